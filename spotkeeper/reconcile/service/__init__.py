"""The function's entry points: HTTP (Cloud Run functions), Lambda, authentication, wiring.

``http.py`` has the paths, ``aws_lambda.py`` the same behind a function URL and EventBridge, ``runtime.py`` what one
process shares between requests. Shapes and answers: ``openapi.json``.

=========================== =================== ================================================================
path                        caller              does
=========================== =================== ================================================================
``POST /v1/sync``           agent               stores facts, runs a round if they are news, answers with role and
                                                document
``POST /v1/tick``           schedule, command   one listing, then a round per active job
``POST /v1/notify/<job>``   command             a round of one job
``POST /v1/event``          Pub/Sub push        a hint: a tick's worth of rounds for the job its instance names
``GET /v1/health``          anyone              ``{"ok": true}``
=========================== =================== ================================================================

**Who is believed.** On Google Cloud a caller brings two tokens. The platform checks the one in
``X-Serverless-Authorization`` (audience: the function's URL) and replaces its signature; the function checks the one
in ``Authorization`` (an agent's audience is ``<URL>/v1/sync``, valid for nothing else). A token without a signature
proves nothing. Schedules and pushes can send one header only, so behind Cloud Run their unsigned token counts as a
hint: it names no node and causes a round at most. If such a token ever arrives with its signature, the platform
checks no caller (the service was opened to all), and the process takes no hints from then on. On AWS, IAM's
statement about the caller takes the token's place.

**Polls.** A sync that reports nothing only reads; ``rounds.py`` answers it from what the process read within the
last half second, unless the agent names a newer document (``Sync.ver``). A round of the same process is visible at
once. Only agents that wait (``Sync.pending``) make the function check whether a round is overdue.

**Environment.**

================================ ==================================================================================
``SPOTKEEPER_STACK``             the stack's name
``SPOTKEEPER_BUCKET``            ``gs://name``, ``s3://name``, or ``sqlite:///path`` in the one-machine cloud
``SPOTKEEPER_BUCKET_ENDPOINT``   root of the bucket's HTTP API, where it is not the cloud's own
``SPOTKEEPER_COMPUTE_ENDPOINT``  root of the Compute API, default ``https://compute.googleapis.com/compute/v1``; on AWS
                                 EC2's, default as ``AWS_ENDPOINT_URL`` says or AWS's own
``SPOTKEEPER_COMPUTE_TOKEN``     bearer token for an endpoint on this machine; never sent to Google
``SPOTKEEPER_ADDRESSES``         networks that machines' addresses lie in, comma-separated; default RFC 1918 and unique
                                 local IPv6, and loopback where the Compute API is on this machine
``SPOTKEEPER_JWKS``              address of the key set for identity tokens, default Google's
``SPOTKEEPER_ISSUER``            expected ``iss``, default ``https://accounts.google.com``
``SPOTKEEPER_AUDIENCE``          expected ``aud``: the function's URL; of agents' tokens, ``/v1/sync`` below it
``SPOTKEEPER_INVOKERS``          e-mails that may call tick and events, comma-separated
``SPOTKEEPER_CLOCK``             ``<real epoch>:<virtual epoch>:<scale>``; unset: the wall clock
``K_SERVICE``                    set by Cloud Run, which has then checked the caller
================================ ==================================================================================

Cloud Run sends one process 80 requests at once and runs at most four (``infra/gcp/function.py``), so reports meet
in few places and one round covers them.
"""
