"""The stack file `Pulumi.<stack>.yaml`: its fields, its validation rules, and the code that reads it.

``model`` and ``pool`` define the fields. ``checks`` has the rules for every cloud, ``gcp`` and ``aws`` each cloud's
rules and defaults, ``both`` rules that the two clouds parametrize. ``read`` turns text into checked settings and reads
the job files that the stack file names.

A provider reports most mistakes in the middle of an `up`, and some never. These rules therefore report every mistake
that can be found offline at once, before anything is declared, with path, value and remedy. This package calls no
cloud, reads no environment variables and does not import Pulumi.
"""
