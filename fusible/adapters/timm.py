"""Adapter for the MLP of `timm`, and those that are written like it."""

from __future__ import annotations

from fusible.adapting import adapter


@adapter("*.Mlp", reads=("fc1", "act", "drop1", "norm", "fc2", "drop2"))
def mlp(module, chain):
    """`drop2(fc2(norm(drop1(act(fc1(x))))))`."""
    names = ["fc1", "act", "drop1", "norm", "fc2", "drop2"]
    if list(module._modules) != names:
        chain.decline(f"its children must be {', '.join(names)}, they are {', '.join(module._modules)}")
    return chain(*module._modules.values())
