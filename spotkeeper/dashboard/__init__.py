"""The dashboard: a web page on this machine's loopback that shows the jobs and the stack of one bucket.

``server.py`` the server and how the browser gets in · ``guard.py`` what may reach it · ``feed.py`` what is read, and
when · ``charts.py`` charts as plain values, ``chart.py`` one on a page · ``frame.py`` what all pages share ·
``pages.py`` their addresses · ``jobs_page.py`` ``job_page.py`` ``log_panel.py`` ``stack_page.py`` the pages ·
``actions.py`` what changes a job

This package imports NiceGUI and its dependencies, so only the command ``spotkeeper dashboard`` imports it.
"""
