"""Every private torch name that fusible uses. `tests/test_torch_names.py` fails loudly if a new torch lacks one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph as keep_graph
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler as _profiler
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode

#: A context whose `__torch_dispatch__` sees each operator.
DispatchMode = TorchDispatchMode

#: Whether a backward pass keeps its graph; True outside of one, the safe side.
keep_graph = keep_graph

#: Whether two tensors share one storage.
shares_memory = torch._C._is_alias_of  # type: ignore[attr-defined]

#: Whether autocast is on for any device type.
any_autocast = torch._C._is_any_autocast_enabled

#: Activations without the Python wrapper of `torch.nn.functional` and with their in-place forms.
gelu_ = torch._C._nn.gelu_  # type: ignore[attr-defined]
silu = torch._C._nn.silu
silu_ = torch._C._nn.silu_

#: Nonzero while a TorchDispatchMode is active.
dispatch_modes = torch._C._len_torch_dispatch_stack

#: Hooks on every module of the process (forward and backward, before and after).
GLOBAL_MODULE_HOOKS = (
    _module._global_forward_pre_hooks,
    _module._global_forward_hooks,
    _module._global_backward_pre_hooks,
    _module._global_backward_hooks,
)

#: The hook dictionaries of one module; they keep their identity while hooks come and go.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks (checkpoint, offload) want to see what is saved now."""
    return _top_saved_tensors_default_hooks(False) is not None


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The innermost saved-tensor hooks, (pack, unpack), which those opened inside of them shut out."""
    return _top_saved_tensors_default_hooks(False)


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be set; inside `disable_saved_tensors_hooks` that raises."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def batched_backward() -> bool:
    """Whether gradients come in batches that only torch's own operators can take apart: under `vmap`, old and new."""
    return peek_interpreter_stack() is not None or torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)


_OLD_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")


def seen_through() -> bool:
    """Whether something looks through the code instead of running it, tensor subclasses aside.

    True under `torch.compile`, `torch.export`, `torch.jit` tracing, `torch.func` transforms, forward-mode AD, and in
    fake, functional and proxy tensor modes.
    """
    return (
        torch.compiler.is_compiling()
        or peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or (dispatch_modes() > 0 and _infra_mode())
    )


def _infra_mode() -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in _INFRA_MODES)


_INFRA_MODES = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.PROXY,
)


def fake_mode() -> Any:
    """A context in which tensors have shapes and no data. Loading it takes a second, so only on demand."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A reference to a tensor's memory that does not keep it: `.expired()`, and `.cdata`, which is `storage_id`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps torch from logging a traceback for each formula that fake tensors cannot run."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def profiler_runs() -> bool:
    """Whether `torch.profiler` or `torch.autograd.profiler` records, in any thread."""
    return _profiler._is_profiler_enabled


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, also of a fake one's."""
    return tensor.untyped_storage()._cdata


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its look for functorch transforms, for callers that have looked (`seen_through`)."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def will_accumulate(parameter: torch.Tensor) -> bool | None:
    """Inside of backward: whether this pass adds a gradient to a leaf; `None` where it returns it (`autograd.grad`)."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def cpu_capabilities() -> dict[str, Any]:
    """What this CPU can do, by name (`avx512_bf16`, ...); empty where torch does not say."""
    found = getattr(torch.cpu, "get_capabilities", None)
    return found() if found else {}


def bare(operator: Any) -> Any:
    """What an operator's overload (`torch.ops.aten.mm.default`) calls, without its Python wrapper."""
    return operator._op


#: Attention on the CPU, which torch's table of FLOPs does not have.
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: torch's attention on the CPU, forward and backward. The last dimension of heads must be dense, which they do not
#: check, and there must be elements.
flash_cpu = bare(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
dflash_cpu = bare(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


def without_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape alone, or stands for something: no value can be read."""
    return tensor.device.type == "meta" or (dispatch_modes() > 0 and _infra_mode())
