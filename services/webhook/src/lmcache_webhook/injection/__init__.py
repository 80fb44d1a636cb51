"""What is added to a pod, and which pods stay unchanged.

| file | concern |
|---|---|
| `injector.py` | from a pod to a patch: the order of all steps | | `pod.py` | the part of a pod
that decides anything, with types, and Kubernetes' quantities | | `command_line.py` | which
container runs vLLM, and where its arguments go | | `kv_events.py` | whether vLLM publishes for
routers | | `plan.py`, `template.py` | what annotations ask for, and what the webhook's settings
give | | `sidecar.py` | the containers and volumes that are added | | `patch.py` | RFC 6902
operations, `PYTHONPATH` |

Nothing here knows HTTP, and nothing here does I/O.
"""
