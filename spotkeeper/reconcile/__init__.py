"""The serverless function: lists, decides, calls. It keeps no state of its own and needs no machine of ours.

``decide/`` and ``select/`` are pure. ``controller/`` carries out what they decide through two protocols,
``store.store.Store`` (the bucket) and ``contract.cloud.Cloud`` (``clouds/``). ``service/`` is what callers reach.
Nothing here imports the agent. ``docs/protocol.md`` states the rules.
"""
