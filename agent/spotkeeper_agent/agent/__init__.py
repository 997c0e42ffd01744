"""The agent's loop, and its decisions for its own machine.

``agent.py`` the loop · ``assignment.py`` the function's replies, and how long the agent works without one ·
``membership.py`` starts and ends generations · ``notices.py`` the cloud's warnings · ``hang.py`` a job that hangs ·
``teardown.py`` leaving a job · ``upgrade.py`` upgrades the agent in place · ``components.py`` builds these parts.

**Boot.** The startup script fetches ``bundles/<sha256>.tar`` with the machine's identity, verifies the hash, unpacks it
to ``var/lib/spotkeeper/bundle/<sha256>/`` and starts the agent with ``PYTHONPATH=<that>/site``: as three systemd units
(root helper, jobs, agent) if systemd runs, otherwise in the foreground. The agent syncs until its role is no longer
``unknown``. A standby fetches the source and starts saver and launcher. A member with a disk mounts that disk. The
bundle has ``site/`` (importable: agent, ``spotkeeper`` and their dependencies), ``job/`` (put on the job's path) and
``templates/job/``.

**Upgrade.** When ``SyncReply.bundle`` changes, the agent executes the new agent under the same pid; ``bundle/current``
is switched once the function has answered the new agent. A launcher from another bundle is replaced between two
generations.
"""
