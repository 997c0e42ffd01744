"""What the engine's driver and the provider it starts agree on."""

ENDPOINT = "SPOTKEEPER_LOCAL_ENDPOINT"
"""Environment: root of the control plane, for the provider."""

PLUGIN = "pulumi-resource-gcp"
"""The name under which the engine looks for the provider on PATH."""
