"""The one-machine cloud: Compute Engine, metadata servers, a bucket, a function and VMs on a laptop.

It replaces only the cloud: all other code that runs on it is production code. It answers 501 to requests that it does
not support. Only the command, the package ``client``, the demo and the tests import it.

``core/`` the cloud's database and clock, REST, errors · ``compute/`` the Compute Engine API · ``machines/`` VMs and
their metadata servers · ``bucket/`` storage · ``serverless/`` the function, its schedule and events ·
``spot_market/`` preemptions and the bill · ``access/`` authentication, IAM, permissions · ``server/`` the control
plane's process · ``lifecycle/`` starts and stops a cloud · ``deploy/`` runs the Pulumi program without the ``pulumi``
command · ``demo/`` is ``make demo``. Training takes real time; all other durations pass on the cloud's faster clock.

**Authentication.** The startup script of a VM runs as the operator, the user who started the cloud, so whoever creates
VMs here can run programs as the operator. Therefore every address, also a metadata server's, answers 403 to any other
user of this machine, even to root (``access/peer.py`` asks the kernel). A call of the API needs a bearer token
(``access/auth.py``): the operator's random token, in the file ``token`` of the cloud's folder (mode 0600), or an access
token that a metadata server gave to the function or to a machine; a machine's token gives access only to that machine's
objects. ``/local/v1/health`` and the public keys need no token. A request with an ``Origin`` header, or with a ``Host``
that is not an address of this machine, gets 403 (metadata servers also accept ``metadata.google.internal``); a body
that is not JSON gets 415, except in uploads and batches. For calls by hand:
``curl -H "Authorization: Bearer $(cat .spotkeeper/local/token)" ...``; for gcloud
``CLOUDSDK_AUTH_ACCESS_TOKEN_FILE=.spotkeeper/local/token``. A deployment, the drain and the command read the token from
that file or from ``SPOTKEEPER_COMPUTE_TOKEN``.
"""
