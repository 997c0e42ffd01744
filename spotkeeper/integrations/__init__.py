"""Other programs' ways to use Spotkeeper. Each module imports its program; ``import spotkeeper`` imports none of them.

``optuna.py`` a study whose trials are jobs · ``journal.py`` its log in the bucket · ``trial_job.py`` one trial's job
"""
