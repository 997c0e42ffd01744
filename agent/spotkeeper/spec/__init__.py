"""The contract all sides share: every document that crosses a process boundary.

Plain frozen structs, no I/O, no cloud. ``docs/design.md`` tells how they move.
"""
