"""A job and a stack as HTML, for the dashboard's pages and for ``report --html``. Pure.

``markup.py`` elements whose text is escaped · ``style.py`` the style sheet · ``jobs.py`` the list of jobs · ``job.py``
the parts of a job's page · ``stack.py`` those of the stack's · ``svg.py`` charts · ``page.py`` one file with everything
"""
