"""`lmcachectl dashboard`: open the broker's page."""

from __future__ import annotations

import contextlib
import threading
import webbrowser
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated
from urllib.parse import urlsplit

import typer

from lmcache_ctl.errors import CtlError
from lmcache_ctl.options import CtlSettings, Url
from lmcache_ctl.reach import Reach
from lmcache_ctl.services import Endpoint, Kind


def dashboard(
    ctx: typer.Context,
    browser: Annotated[
        bool,
        typer.Option("--browser/--no-browser", help="Open the page, or only print its address."),
    ] = True,
    url: Url = None,
) -> None:
    """Open the broker's page in a browser.

    In a cluster its port is forwarded until Ctrl-C, to a port on loopback of
    this machine. The page asks for a token by itself; none is put into the
    address.
    """
    reach = Reach(ctx.obj, Kind.BROKER, url=url)
    with reach.services() as services:
        broker, answer = reach.first_answer(services, lambda caller: caller.get("/"))
        if answer.status != HTTPStatus.OK:
            raise CtlError(f"{broker.url} has no page: is it a broker?")
        with _address_of(reach.settings, broker) as page:
            typer.echo(page)
            if broker.token_secret:
                secret = f"kubectl -n {broker.namespace} get secret {broker.token_secret}"
                key = "-o jsonpath='{.data.operator-token}' | base64 -d"
                typer.echo(f"The token that the page asks for: {secret} {key}", err=True)
            if browser and not webbrowser.open(page):
                typer.echo("No browser was found here: open the address in one.", err=True)
            if broker.pod:
                typer.echo(f"Forwarding to pod {broker.pod} until Ctrl-C.", err=True)
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()


@contextlib.contextmanager
def _address_of(settings: CtlSettings, broker: Endpoint) -> Iterator[str]:
    """Yield an address that a browser on this machine can reach."""
    parts = urlsplit(broker.url)
    if not broker.pod:
        yield f"{broker.url}/"
        return
    from lmcache_ctl.kube.forward import forwarded

    assert parts.port is not None, "that of a pod is in its address"
    with forwarded(settings, broker.pod, parts.port) as address:
        if parts.scheme == "https":  # the chart's certificates name localhost
            address = f"localhost:{address.rpartition(':')[2]}"
        yield f"{parts.scheme}://{address}/"
