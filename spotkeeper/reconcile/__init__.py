"""The serverless function: it lists the machines, decides and calls the cloud. It keeps no state between calls.

``decide/`` and ``select/`` are pure. ``controller/`` carries out what they decide through two protocols,
``store.store.Store`` (the bucket) and ``contract.cloud.Cloud`` (``clouds/``). ``service/`` has the function's entry
points. Nothing here imports the agent. ``docs/protocol.md`` states the rules.
"""
