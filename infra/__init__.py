"""The program that `pulumi up` runs: it declares machine templates and static machines, but no dynamic machines."""
