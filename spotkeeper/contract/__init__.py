"""The contract all sides share: every document that crosses a process boundary.

Plain frozen structs, no I/O, no cloud. ``docs/protocol.md`` says who writes which document.
"""
