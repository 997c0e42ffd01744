"""The training loop around a user's code: ``attach()``, ``run.steps()``, and the actions that all ranks take together.

``attach.py`` and ``run.py`` are the public interface. Between two batches, after an optimizer step, ``boundary.py``
makes all ranks take the same action (nothing, save, publish, stop), agreed on asynchronously through one integer.
``rendezvous.py`` starts a generation; ``position.py`` saves and restores the run's step and place in the data;
``reporter.py`` writes the control file and ``result.json``; ``metrics.py`` keeps the history of what the script
reports; ``lag.py`` finds slow machines; ``diagnostics.py`` has messages for the script's author.

**Loops of other frameworks.** Lightning and Hugging Face's trainer run their own loops. ``external.py`` gives
``run.steps()`` batches without data, one per optimizer step of the framework, so saves, agreement and stop work as in
any run. The framework's own state contains its place in the data. ``lightning.py`` and ``huggingface.py`` describe
which state they save, in which hooks, and how they restore it.

**How a process ends.** A stop raises ``SystemExit(0)``. Before that, local rank 0 writes ``result.json``: ``{"outcome":
"stopped" | "done", "gen", "step", "commit": [gen, step] | null}``. Exit code 93 means "a restart cannot help".
"""
