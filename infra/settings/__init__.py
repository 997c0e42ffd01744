"""The stack file `Pulumi.<stack>.yaml`: its fields, its validation rules, and the code that reads it.

``model`` and ``pool`` define the fields. ``checks`` has the rules for every cloud (those on three subjects are in
``alerts``, ``reserved`` and ``teams``), ``gcp`` and ``aws`` the rules and defaults of one cloud, ``both`` those that
differ between the clouds only in parameters. ``read`` turns text into checked settings, and reads the job files that
the stack file names.

A cloud's Pulumi provider reports most mistakes in the middle of an `up`, and some never. The rules report all mistakes
that can be found offline at once, before anything is declared, with path, value and remedy. This package calls no
cloud, reads no environment variables and does not import Pulumi.
"""
