"""What no stack may declare, whoever writes the program: rules over resources, and the pack that Pulumi runs.

The rules import the standard library alone, so that they can be read and tested without
Pulumi, and so that the pack can live in an environment of its own (``requirements.txt``).
"""
