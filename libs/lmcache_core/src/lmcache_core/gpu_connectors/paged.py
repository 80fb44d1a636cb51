"""KV in the pages of a serving engine, addressed by slot mappings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from lmcache_kernels.errors import KernelInputError
from lmcache_kernels.paged_copy import paged_gather_steps, paged_scatter_steps

from lmcache_core._typing import override
from lmcache_core.errors import LayoutError
from lmcache_core.gpu_connectors.addresses import Addresses
from lmcache_core.gpu_connectors.base import GPUConnectorInterface, check_format, checked_tensor
from lmcache_core.gpu_connectors.binding import Binding, bind_declared, bind_pairs, signature_of
from lmcache_core.gpu_connectors.layout import KVLayout, gaps_between
from lmcache_core.gpu_connectors.staging import Staging
from lmcache_core.gpu_connectors.streams import LaunchedCopies, has_streams, record_event
from lmcache_core.memory.base import MemoryFormat, MemoryObj
from lmcache_core.memory.device_copies import launch_copy
from lmcache_core.record import TensorSpec


class PagedConnector(GPUConnectorInterface):
    """Base of the connectors for paged memory: check everything, copy all layers, wait.

    Everything is checked before anything is written: on an error, memory object and pages are
    untouched. The memory object may be on the pages' device or in host memory; both directions have
    finished when they return, unless their arguments are from `launching`. On a device with
    streams, copies start behind the caller's stream, and behind the event `after` if that is among
    the arguments. Thread-safe.

    Args:
        staging_tokens: Size of the staging buffers on the pages' device that are kept between
            calls; 0 allocates on demand.
        staging: The buffers, which other connectors may use, too; by default this one's own.
    """

    reports_progress = True

    def __init__(self, staging_tokens: int = 0, staging: Staging | None = None) -> None:
        # Engines pass the same tensors with every call. The binding holds them, so that an address
        # cannot be reused for other memory; it is replaced as a whole, so that no lock is needed.
        self._last: tuple[tuple[Any, ...], Binding] | None = None
        self._staging_tokens = staging_tokens
        self._staging = Staging() if staging is None else staging

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy KV. Needs `kvcaches` and `slot_mapping`, or `addresses` instead of both."""
        check_format(memory_obj)
        self._fill(memory_obj, start, end, kwargs)

    @override
    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy KV. Needs `kvcaches` and `slot_mapping`, or `addresses` instead of both; with
        `wanted`, the first of some of the tokens and one past the last, copies only these; with
        `group`, only the layer group of this number. With `decode`, the memory object is encoded,
        and `decode` is called with two flat uint8 tensors on the pages' device: one to fill with
        the content on the current stream, and scratch of any size.
        """
        wanted: tuple[int, int] = kwargs.get("wanted", (start, end))
        decode: Callable[[torch.Tensor, torch.Tensor], None] | None = kwargs.get("decode")
        addresses = self._addresses(*wanted, kwargs)
        binding = addresses.binding
        group: int | None = kwargs.get("group")
        content = None
        if decode is None:
            check_format(memory_obj)
            content = _content(memory_obj, binding.layout, end - start, is_filled=False)

        progress = kwargs.get("progress")
        with self._staging.scattered.near(
            content, binding, end - start, self._staging_tokens, kwargs.get("after")
        ) as (staged, scratch):
            copies = addresses.copies(staged, start, end, wanted, writes_pages=True, group=group)
            if decode is not None:
                decode(staged, scratch)
            elif content is not None and staged is not content:
                used = _used(binding.layout, end - start, group)
                launch_copy(staged[used], content[used], host=content[used])
            for offset, copy in copies:
                for num_pages in paged_scatter_steps(copy):
                    if progress is not None:
                        progress(offset + num_pages * copy.page_bytes)
            ended = record_event(binding.device)
        _launched(kwargs, ended, ended)

    @override
    def launching(self, kwargs: dict[str, Any], launched: LaunchedCopies) -> dict[str, Any]:
        return {**kwargs, "launched": launched}

    @override
    def is_on_host(self, kwargs: dict[str, Any]) -> bool:
        return self._binding(kwargs).device.type == "cpu"

    def binding_of(self, kvcaches: Any) -> Binding:
        """Return the layout and the pages of these tensors as seen by this connector.

        Raises:
            ValueError: There are none, or they are not as declared.
        """
        if kvcaches is None:
            raise ValueError("kvcaches is missing: pass the pages of every layer")
        signature = signature_of(kvcaches)
        last = self._last
        if last is not None and last[0] == signature:
            return last[1]
        try:
            binding = self._bind(kvcaches)
        except KernelInputError as exc:
            raise LayoutError(f"kvcaches: {exc}") from exc
        devices = {str(pages.device) for pages in binding.pages}
        if len(devices) != 1:
            raise LayoutError(f"kvcaches are on several devices: {sorted(devices)}")
        # Elsewhere nothing orders copies and the engine's work, nor says when copies have ended.
        if binding.device.type != "cpu" and not has_streams(binding.device):
            raise LayoutError(
                f"kvcaches are on {binding.device}: KV can be cached only on cuda or cpu"
            )
        self._last = signature, binding
        return binding

    def addresses_of(self, kvcaches: Any, slot_mapping: Any, begin: int, end: int) -> Addresses:
        """Return the slots of tokens `[begin, end)`, checked once for many chunks: pass the result
        as `addresses`, as long as the engine's tensors stay the same.

        Raises:
            ValueError: An argument is missing.
            LayoutError: The tensors or the slots do not match.
        """
        return Addresses.of(self.binding_of(kvcaches), slot_mapping, begin, end)

    @abstractmethod
    def _bind(self, kvcaches: Any) -> Binding:
        """Match tensors with those that the connector was made for; LayoutError if they differ."""

    def _fill(self, memory_obj: MemoryObj, start: int, end: int, kwargs: dict[str, Any]) -> None:
        """Fill a memory object of any format; see `from_gpu`."""
        progress = kwargs.get("progress")
        addresses = self._addresses(start, end, kwargs)
        binding = addresses.binding
        content = _content(memory_obj, binding.layout, end - start, is_filled=True)
        with self._staging.gathered.near(
            content, binding, end - start, self._staging_tokens, kwargs.get("after")
        ) as (staged, _):
            is_filled_at_once = staged is content and binding.device.type == "cpu"
            copies = addresses.copies(staged, start, end, (start, end), writes_pages=False)
            for gap in gaps_between(binding.layout.tensor_specs(end - start)):
                # The digest covers these bytes, and their previous content must stay private.
                staged[gap].zero_()
            for offset, copy in copies:
                for num_pages in paged_gather_steps(copy):
                    if progress is not None and is_filled_at_once:
                        progress(offset + num_pages * copy.page_bytes)
            read = record_event(binding.device)
            if staged is not content:
                launch_copy(content, staged, host=content)
            ended = record_event(binding.device)
        _launched(kwargs, read, ended)

    def _binding(self, kwargs: dict[str, Any]) -> Binding:
        addresses: Addresses | None = kwargs.get("addresses")
        return addresses.binding if addresses else self.binding_of(kwargs.get("kvcaches"))

    def _addresses(self, start: int, end: int, kwargs: dict[str, Any]) -> Addresses:
        checked: Addresses | None = kwargs.get("addresses")
        return checked or self.addresses_of(
            kwargs.get("kvcaches"), kwargs.get("slot_mapping"), start, end
        )


class PagedGPUConnector(PagedConnector):
    """For KV in pages of a declared layout, passed as two keyword arguments.

    - `kvcaches`: the tensors of every layer as declared by `KVLayout`, group after group; or by
    layer name (`LayerGroup.layers`).
    - `slot_mapping`: int64 `[num_tokens]` for the whole token sequence, `slot = block * block_size
    + offset`, on the pages' device or the CPU; one for all groups, or one for each group (a
    sequence in their order, or by group name). It begins with -1 for tokens whose KV the engine
    already has; `[start, end)` must not overlap them, and must not name a slot twice. If groups
    share memory, as in hybrid models, a block belongs to one of them.

    A memory object contains one group as `[sides, num_layers, num_tokens, hidden]`; several groups
    as one flat tensor, each group's blob at a multiple of 512 bytes (`tensor_specs`), with zeros
    between them. Its format is KV_BLOB in both cases.
    """

    def __init__(
        self, layout: KVLayout, staging_tokens: int = 0, staging: Staging | None = None
    ) -> None:
        super().__init__(staging_tokens, staging)
        self.layout = layout

    def take_staging(self, device: torch.device, decodes: bool = False) -> bool:
        """Allocate the staging buffers if they are missing; return whether they are here. Without
        them, copies raise `CapacityError`.

        Args:
            device: That of the pages.
            decodes: With scratch for decoding.
        """
        size = self.layout.num_bytes(self._staging_tokens)
        return not size or self._staging.take(size, device, decodes)

    @override
    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of the memory object, in elements of `layout.kv_dtype`."""
        return torch.Size(self.layout.shape(num_tokens))

    @override
    def tensor_specs(self, num_tokens: int) -> tuple[TensorSpec, ...]:
        return self.layout.tensor_specs(num_tokens)

    def _bind(self, kvcaches: Any) -> Binding:
        return bind_declared(self.layout, kvcaches)


class VLLMPagedMemGPUConnector(PagedConnector):
    """For K and V in pages `[num_blocks, block_size, num_heads, head_size]`, given as two keyword
    arguments.

    - `kvcaches`: for each layer a pair (K, V), or one tensor `[2, num_blocks, block_size,
      num_heads, head_size]`; strides are free.
    - `slot_mapping`: as for `PagedGPUConnector`, one for all layers.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
    """

    def __init__(self, hidden_dim_size: int, num_layers: int) -> None:
        super().__init__()
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers

    @override
    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size((2, self.num_layers, num_tokens, self.hidden_dim_size))

    def _bind(self, kvcaches: Any) -> Binding:
        return bind_pairs(self.num_layers, self.hidden_dim_size, kvcaches)


class VLLMPagedMemGPUConnectorV2(VLLMPagedMemGPUConnector):
    """Like `VLLMPagedMemGPUConnector`, but `from_gpu` accepts a memory object of any format and
    makes it a KV_BLOB.

    Args:
        hidden_dim_size: num_heads * head_size on this worker.
        use_gpu: Keep a staging buffer on the pages' device.
        **kwargs: Options of that buffer, ignored unless `use_gpu`: `chunk_size`, its size in tokens
            (longer chunks allocate), required; `dtype` and `device`, which must equal those of the
            pages if given.

    Raises:
        TypeError: An unknown keyword argument.
        ValueError: `use_gpu` without a positive `chunk_size`.
    """

    def __init__(
        self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(hidden_dim_size, num_layers)
        unknown = sorted(set(kwargs) - {"chunk_size", "dtype", "device"})
        if unknown:
            raise TypeError(
                f"unknown keyword argument {', '.join(unknown)}; known: chunk_size, dtype, device"
            )
        chunk_size = kwargs.get("chunk_size")
        if use_gpu and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(
                "use_gpu=True needs chunk_size, the tokens that the staging buffer has room for;"
                f" chunk_size={chunk_size!r}"
            )
        self.use_gpu = use_gpu
        self._dtype: torch.dtype | None = kwargs.get("dtype") if use_gpu else None
        self._device = (
            torch.device(kwargs["device"]) if use_gpu and kwargs.get("device") is not None else None
        )
        if use_gpu:
            self._staging_tokens = int(chunk_size or 0)

    @override
    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **kwargs: Any) -> None:
        """Copy like `VLLMPagedMemGPUConnector`, and set the memory object's format to KV_BLOB."""
        self._fill(memory_obj, start, end, kwargs)
        memory_obj.metadata.fmt = MemoryFormat.KV_BLOB

    def _bind(self, kvcaches: Any) -> Binding:
        binding = super()._bind(kvcaches)
        pages = binding.pages[0]
        if self._dtype not in (None, pages.dtype):
            raise LayoutError(
                f"the pages are of {pages.dtype}; the connector was made for {self._dtype}"
            )
        asked = self._device
        if asked is not None and (
            asked.type != pages.device.type or asked.index not in (None, pages.device.index)
        ):
            raise LayoutError(
                f"the pages are on {pages.device}; the connector was made for {asked}"
            )
        return binding


def _launched(
    kwargs: dict[str, Any], read: torch.cuda.Event | None, ended: torch.cuda.Event | None
) -> None:
    """Note a launched copy, or wait for it if the caller does not."""
    launched: LaunchedCopies | None = kwargs.get("launched")
    if read is None or ended is None:  # the device has no streams
        return
    if launched is None:
        ended.synchronize()
    else:
        launched.read.append(read)
        launched.ended.append(ended)


def _used(layout: KVLayout, num_tokens: int, group: int | None) -> slice:
    """Return the bytes of a memory object that belong to a group; all if it is None."""
    if group is None:
        return slice(None)
    spec = layout.tensor_specs(num_tokens)[group]
    return slice(spec.offset, spec.offset + spec.length)


def _content(
    memory_obj: MemoryObj, layout: KVLayout, num_tokens: int, is_filled: bool
) -> torch.Tensor:
    """Return all bytes of a memory object, flat."""
    tensor = checked_tensor(
        memory_obj, layout.shape(num_tokens), getattr(torch, layout.kv_dtype), is_filled
    )
    return tensor.view(-1).view(torch.uint8)
