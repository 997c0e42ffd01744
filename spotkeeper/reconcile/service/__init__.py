"""The function's entry points: HTTP (Cloud Run functions), Lambda, authentication, wiring.

``http.py`` has the paths, ``aws_lambda.py`` serves the same paths behind a function URL and handles EventBridge's
events, ``runtime.py`` has what one process keeps between requests. Shapes and answers: ``openapi.json``.

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

**Who is believed.** On Google Cloud a caller brings two tokens. The platform checks the token in
``X-Serverless-Authorization`` (audience: the function's URL) and replaces its signature. The function checks the token
in ``Authorization`` (an agent's audience is ``<URL>/v1/sync``, valid for nothing else). A token without a signature
proves nothing. Schedules and pushes can send only one header, so behind Cloud Run their unsigned token counts as a
hint: it names no node and causes a round at most. If such a token ever arrives with its signature, the platform does
not check callers (the service was opened to all), and the process takes no hints from then on. On AWS, IAM's statement
about the caller replaces the token.

**Polls.** A sync that reports nothing only reads; ``rounds.py`` answers it from what the process read within the
last half second, unless the agent names a newer document (``Sync.ver``). A round in the same process discards what was
read. Only agents that wait (``Sync.pending``) make the function check whether a round is overdue.

**Environment.**

================================ ==================================================================================
``SPOTKEEPER_STACK``             the stack's name
``SPOTKEEPER_BUCKET``            ``gs://name``, ``s3://name``, or ``sqlite:///path`` in the one-machine cloud
``SPOTKEEPER_BUCKET_ENDPOINT``   root of the bucket's HTTP API, if it is not the cloud's own
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

Cloud Run sends one process 80 requests at once and runs at most four (``infra/gcp/function.py``), so many reports
arrive in one process, and one round covers them.
"""
