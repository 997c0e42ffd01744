"""Notifications: which events become messages, their texts, and sending them to channels.

``message.py`` turns ledger entries into notifications and ``formats.py`` a notification into a channel's request; both
are pure. ``addresses.py`` reads addresses from the secret store, ``https.py`` sends to public addresses only,
``deliver.py`` sends what waits below ``notifications/``.

A notification is stored before its ledger entry (``controller/ledger.py``) and deleted after it was sent. So a killed
function loses none, and can send one twice, with the same id.
"""
