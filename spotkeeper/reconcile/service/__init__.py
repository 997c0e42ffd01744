"""The function's entry points: HTTP (Cloud Run functions), Lambda, authentication, wiring.

``http.py`` has the paths, ``aws_lambda.py`` serves the same paths behind a function URL and handles EventBridge's
events, ``runtime.py`` has what one process keeps between requests. ``openapi.json`` has all requests and answers.

=============================== =================== ============================================================
path                            caller              does
=============================== =================== ============================================================
``POST /v1/sync``               agent               stores facts, runs a round if they are new, answers with role
                                                    and document
``POST /v1/tick``               schedule, command   one listing, then a round per active job
``POST /v1/notify/<job>``       command             a round of one job
``POST /v1/channels/<c>/test``  command             sends a test message to a channel
``POST /v1/event``              Pub/Sub push        a hint: a round of the job whose machine the event names
``GET /v1/health``              anyone              ``{"ok": true}``
=============================== =================== ============================================================

**Who is believed.** On Google Cloud a caller sends two tokens. Cloud Run checks the token in
``X-Serverless-Authorization`` (audience: the function's URL) and removes its signature. The function checks the token
in ``Authorization`` (an agent's token has the audience ``<URL>/v1/sync`` and is valid for nothing else). The schedule
and pushes can send only one token. Cloud Run removes its signature, so the function cannot check this token again and
takes the request as a hint, which names no node and causes a round at most. If such a token arrives with its signature,
Cloud Run has not checked it, because someone opened the service to all callers; from then on the process accepts no
token without signature. On AWS there are no tokens: IAM says who the caller is.

**Polls.** A sync that reports nothing is answered from what the process read within the last half second
(``rounds.py``), unless the agent has a newer document (``Sync.ver``) or a round ran in this process since. While a job
is at rest (all its nodes are members and no change is pending, or it is DONE: ``document.at_rest``), the function
checks whether a round is overdue only for agents that wait for the result of a report (``Sync.pending``).

**Environment.**

================================ ==================================================================================
``SPOTKEEPER_STACK``             the stack's name
``SPOTKEEPER_BUCKET``            ``gs://name``, ``s3://name``, or ``sqlite:///path`` in the one-machine cloud
``SPOTKEEPER_BUCKET_ENDPOINT``   root of the bucket's HTTP API, if it is not the cloud's own
``SPOTKEEPER_BUCKET_REGION``     on AWS the bucket's, if that is not the function's
``SPOTKEEPER_REGION``            the function's own: in several regions, it does nothing unless that is the home region;
                                 on Lambda it is ``AWS_REGION``
``SPOTKEEPER_COMPUTE_ENDPOINT``  root of the Compute API, default ``https://compute.googleapis.com/compute/v1``; on AWS
                                 root of the EC2 API, default ``AWS_ENDPOINT_URL`` or else AWS's own
``SPOTKEEPER_COMPUTE_TOKEN``     bearer token for an endpoint on this machine; never sent to Google
``SPOTKEEPER_ADDRESSES``         networks in which machines' addresses must be, comma-separated; default RFC 1918 and
                                 unique local IPv6, and loopback if the Compute API is on this machine
``SPOTKEEPER_CHANNELS``          JSON: the https address of each channel, or a reference to the secret that has it
``SPOTKEEPER_JWKS``              address of the key set for identity tokens, default Google's
``SPOTKEEPER_ISSUER``            expected ``iss``, default ``https://accounts.google.com``
``SPOTKEEPER_AUDIENCE``          the function's URL: the expected ``aud``; in agents' tokens, ``/v1/sync`` is added
``SPOTKEEPER_INVOKERS``          e-mails that may call tick and events, comma-separated
``SPOTKEEPER_SUBMITTERS``        on AWS, ARNs of who may assume the submitters' role, comma-separated
``SPOTKEEPER_CLOCK``             ``<real epoch>:<virtual epoch>:<scale>``; unset: the wall clock
``K_SERVICE``                    set by Cloud Run; if set, Cloud Run has checked the caller
================================ ==================================================================================

Cloud Run runs at most four processes and sends each up to 80 requests at once (``infra/gcp/function.py``), so many
reports arrive in one process, and one round handles them together.
"""
