"""The serverless control plane: looks, decides, calls. It keeps no state of its own and runs on no machine of ours.

``decide/`` and ``select`` are pure; ``round`` and ``sweep`` carry out what they say through two protocols,
``store_api.Store`` (the bucket) and ``spec.cloud.Cloud``. Nothing here may import the machine's side (``vm``).
"""
