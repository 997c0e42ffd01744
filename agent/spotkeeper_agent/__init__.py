"""The agent on a machine: one small process that runs the machine's part of a job.

``agent/`` the loop · ``core/`` settings, state, requests to the function · ``cloud/`` metadata, bucket, identity ·
``job/`` one job's processes and files · ``host/`` disks, power, the root helper · ``preflight/`` checks of the machine
· ``launcher/`` runs in the job's Python. The function decides about the job as a whole. The agent never imports torch.
"""
