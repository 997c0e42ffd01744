"""The agent on a VM: one small process that keeps the job on its machine alive.

``agent.py`` holds the loop; every other file is one room of it. Nothing here decides
about the job as a whole: that is the function's work. Nothing here imports torch.
"""
