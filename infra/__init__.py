"""The program that `pulumi up` runs: it declares a stack's templates and static machines, never dynamic ones."""
