"""The program that `pulumi up` runs: shapes and floors of a stack, never its fleet."""
