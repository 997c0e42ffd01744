"""What `pulumi destroy` may do to data, as resource options: one meaning for every kind of store."""

from __future__ import annotations

import pulumi

from infra.settings import OnDestroy


def protection(on_destroy: OnDestroy) -> pulumi.ResourceOptions:
    """``protect``: the engine refuses before anything happens. ``retain``: it forgets it, and the cloud keeps it."""
    match on_destroy:
        case "protect":
            return pulumi.ResourceOptions(protect=True)
        case "retain":
            return pulumi.ResourceOptions(retain_on_delete=True)
        case "delete":
            return pulumi.ResourceOptions()
