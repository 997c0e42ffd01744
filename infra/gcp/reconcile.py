"""The function that keeps the fleet, what calls it, and what the drain that ends it goes by.

Three ways lead to a round: an agent's report, the schedule, and the cloud's own
preemption event (log sink -> topic -> push). The function's name is fixed, because its
address is in every template.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.drain import Drained, GcpDrainArgs
from infra.gcp.identity import Identity
from infra.gcp.storage import Storage
from infra.settings import Settings
from infra.settings.gcp import COMPUTE

# A gang's reports meet in few processes, where one round covers them all: with a process for each report, a thousand
# of them took eighteen seconds to be heard, and cost four rounds and not two (tests/scale).
INSTANCES, AT_ONCE = 4, 80
_IMAGES_DAYS = 7
_TRIES = 5  # an event that five posts could not deliver is older than the next tick
_DEAD_S = 7 * 24 * 3600  # so long somebody can look at one
PREEMPTED = 'protoPayload.methodName="compute.instances.preempted"'


@dataclass(frozen=True)
class FunctionArgs:
    settings: Settings
    storage: Storage
    identity: Identity


class Function(pulumi.ComponentResource):
    """``url``: where agents report. ``access``: who may call it."""

    def __init__(self, name: str, args: FunctionArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Function", name, None, opts)
        settings = args.settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.images = self._images(settings)
        self.function = gcp.cloudfunctionsv2.Function(
            "function",
            name=naming.stack(settings.stack),
            location=settings.region,
            description="Spotkeeper reconcile: one round for each job, by schedule, report and event",
            build_config=gcp.cloudfunctionsv2.FunctionBuildConfigArgs(
                runtime=settings.reconcile.runtime,
                entry_point="main",
                docker_repository=self.images.id,
                service_account=args.identity.build.id,  # the default build identity has too few roles
                source=gcp.cloudfunctionsv2.FunctionBuildConfigSourceArgs(
                    storage_source=gcp.cloudfunctionsv2.FunctionBuildConfigSourceStorageSourceArgs(
                        bucket=args.storage.bucket.name, object=args.storage.source.name
                    )
                ),
            ),
            service_config=gcp.cloudfunctionsv2.FunctionServiceConfigArgs(
                available_memory=f"{settings.reconcile.memory_mb}M",
                timeout_seconds=settings.reconcile.timeout_s,
                available_cpu="1",  # less of one serves one request at a time
                max_instance_count=INSTANCES,
                max_instance_request_concurrency=AT_ONCE,
                ingress_settings="ALLOW_ALL",  # guarded by identity, so that an operator's laptop can poke
                service_account_email=args.identity.function.email,
                environment_variables=args.identity.clock.email.apply(lambda email: environment(settings, email)),
            ),
            labels=naming.labels(settings.labels, settings.stack),
            # Built by its account, run by its rights: both must be there first.
            opts=pulumi.ResourceOptions.merge(
                self._child, pulumi.ResourceOptions(depends_on=[*args.identity.bindings, *args.storage.access])
            ),
        )
        self.url = self.function.url
        self.access = [
            self._invoker("node", args.identity.node.member),
            self._invoker("clock", args.identity.clock.member),
            *(self._invoker(f"person-{i}", member) for i, member in enumerate(settings.reconcile.invokers)),
        ]
        self.parts: list[pulumi.Resource] = [self.function, *self.access]
        self.register_outputs({"url": self.url})

    def _images(self, settings: Settings) -> gcp.artifactregistry.Repository:
        """Of the function's builds. The project's own (gcf-artifacts) would outlive the stack, and bill."""
        return gcp.artifactregistry.Repository(
            "images",
            repository_id=naming.stack(settings.stack),
            location=settings.region,
            format="DOCKER",
            description=f"Spotkeeper {settings.stack}: builds of the function",
            cleanup_policies=[
                gcp.artifactregistry.RepositoryCleanupPolicyArgs(
                    id="older",
                    action="DELETE",
                    condition=gcp.artifactregistry.RepositoryCleanupPolicyConditionArgs(
                        tag_state="ANY", older_than=f"{_IMAGES_DAYS * 24 * 3600}s"
                    ),
                ),
                gcp.artifactregistry.RepositoryCleanupPolicyArgs(
                    id="newest",
                    action="KEEP",
                    most_recent_versions=gcp.artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(
                        keep_count=2
                    ),
                ),
            ],
            labels=naming.labels(settings.labels, settings.stack),
            opts=self._child,
        )

    def _invoker(self, name: str, member: pulumi.Input[str]) -> gcp.cloudrunv2.ServiceIamMember:
        """On the Run service: the function's own invoker role does not admit direct calls."""
        return gcp.cloudrunv2.ServiceIamMember(
            f"call-{name}",
            name=self.function.name,
            location=self.function.location,
            role="roles/run.invoker",
            member=member,
            opts=self._child,
        )


def function_url(settings: Settings) -> str:
    """The function's address before it exists: the form that Cloud Functions promises."""
    known = f"https://{settings.region}-{settings.project}.cloudfunctions.net/{naming.stack(settings.stack)}"
    return settings.endpoints.function or known


def environment(settings: Settings, clock_email: str) -> dict[str, str]:
    """The function's settings (`docs/design.md`); what only another cloud needs is left out."""
    people = [member.partition(":")[2] for member in settings.reconcile.invokers]
    values = {
        "SPOTKEEPER_STACK": settings.stack,
        "SPOTKEEPER_BUCKET": f"gs://{settings.bucket_name()}",
        "SPOTKEEPER_AUDIENCE": function_url(settings),
        "SPOTKEEPER_INVOKERS": ",".join([clock_email, *people]),
        "THREADS": str(AT_ONCE),  # of functions-framework: with its four, four rounds would keep all reports waiting
    }
    elsewhere = {
        "SPOTKEEPER_COMPUTE_ENDPOINT": settings.endpoints.compute if settings.endpoints.compute != COMPUTE else "",
        "SPOTKEEPER_JWKS": settings.endpoints.jwks,
        "SPOTKEEPER_ISSUER": settings.endpoints.issuer,
    }
    return values | {name: value for name, value in elsewhere.items() if value}


def drain_args(settings: Settings, storage: Storage) -> GcpDrainArgs:
    """What the stack's drain goes by."""
    return GcpDrainArgs(
        stack=settings.stack,
        project=settings.project,
        zones=settings.zones,
        bucket=storage.bucket.name,
        compute=settings.endpoints.compute,
        storage=settings.endpoints.storage,
    )


@dataclass(frozen=True)
class TriggersArgs:
    settings: Settings
    function: Function
    identity: Identity
    drained: Drained


class Triggers(pulumi.ComponentResource):
    """Schedule and preemption route. They go before the drain: a live schedule would refill what it empties."""

    def __init__(self, name: str, args: TriggersArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Triggers", name, None, opts)
        self._args = args
        self._called = naming.stack(args.settings.stack)
        self._child = pulumi.ResourceOptions(parent=self)
        self._last = pulumi.ResourceOptions(parent=self, depends_on=[args.drained.drain])
        self.tick = self._schedule()
        self.push = self._preemption_route()
        self.register_outputs({})

    def _schedule(self) -> gcp.cloudscheduler.Job:
        settings = self._args.settings
        minutes = settings.reconcile.tick_minutes
        return gcp.cloudscheduler.Job(
            "tick",
            name=self._called,
            region=settings.region,
            schedule="* * * * *" if minutes == 1 else "0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
            time_zone="Etc/UTC",
            attempt_deadline=f"{min(settings.reconcile.timeout_s, 1800)}s",
            retry_config=gcp.cloudscheduler.JobRetryConfigArgs(retry_count=0),  # the next tick is the retry
            http_target=gcp.cloudscheduler.JobHttpTargetArgs(
                uri=pulumi.Output.concat(self._args.function.url, "/v1/tick"),
                http_method="POST",
                headers={"Content-Type": "application/json"},
                body=base64.b64encode(b"{}").decode(),
                oidc_token=gcp.cloudscheduler.JobHttpTargetOidcTokenArgs(
                    service_account_email=self._args.identity.clock.email, audience=self._args.function.url
                ),
            ),
            opts=self._last,
        )

    def _preemption_route(self) -> gcp.pubsub.Subscription:
        """A machine can vanish before its own scripts run: the provider's log is the witness."""
        settings = self._args.settings
        topic, published = self._topic()
        dead = self._dead_letters()
        push = gcp.pubsub.Subscription(
            "push",
            name=f"{self._called}-preempted",
            topic=topic.name,
            ack_deadline_seconds=60,
            message_retention_duration="600s",  # an older loss has long been found by the tick
            expiration_policy=gcp.pubsub.SubscriptionExpirationPolicyArgs(ttl=""),
            retry_policy=gcp.pubsub.SubscriptionRetryPolicyArgs(minimum_backoff="5s", maximum_backoff="60s"),
            dead_letter_policy=gcp.pubsub.SubscriptionDeadLetterPolicyArgs(
                dead_letter_topic=dead.id, max_delivery_attempts=_TRIES
            ),
            push_config=gcp.pubsub.SubscriptionPushConfigArgs(
                push_endpoint=pulumi.Output.concat(self._args.function.url, "/v1/event"),
                oidc_token=gcp.pubsub.SubscriptionPushConfigOidcTokenArgs(
                    service_account_email=self._args.identity.clock.email, audience=self._args.function.url
                ),
            ),
            labels=naming.labels(settings.labels, settings.stack),
            opts=pulumi.ResourceOptions.merge(self._last, pulumi.ResourceOptions(depends_on=[published])),
        )
        gcp.pubsub.SubscriptionIAMMember(  # who gives a message up takes it from here
            "pubsub-gives-up",
            subscription=push.name,
            role="roles/pubsub.subscriber",
            member=self._pubsub.member,
            opts=self._child,
        )
        return push

    def _topic(self) -> tuple[gcp.pubsub.Topic, pulumi.Resource]:
        """Where preemptions of this stack's machines arrive; and the right to publish them."""
        labels = naming.labels(self._args.settings.labels, self._args.settings.stack)
        called = f"{self._called}-preempted"
        topic = gcp.pubsub.Topic(
            "preempted", name=called, labels=labels, message_retention_duration="3600s", opts=self._child
        )
        machines = f"/instances/{naming.machine_prefix(self._args.settings.stack)}"
        sink = gcp.logging.ProjectSink(
            "preempted",
            name=called,
            destination=pulumi.Output.concat("pubsub.googleapis.com/", topic.id),
            filter=f'{PREEMPTED} AND protoPayload.resourceName=~"{machines}"',
            unique_writer_identity=True,
            opts=self._child,
        )
        publisher = gcp.pubsub.TopicIAMMember(
            "sink-publishes",
            topic=topic.name,
            role="roles/pubsub.publisher",
            member=sink.writer_identity,
            opts=self._child,
        )
        return topic, publisher

    def _dead_letters(self) -> gcp.pubsub.Topic:
        """What could not be delivered, kept for a person to look at: a topic keeps nothing without a subscription."""
        labels = naming.labels(self._args.settings.labels, self._args.settings.stack)
        called = f"{self._called}-dead"
        self._pubsub = gcp.projects.ServiceIdentity(
            "pubsub", project=self._args.settings.project, service="pubsub.googleapis.com", opts=self._child
        )
        dead = gcp.pubsub.Topic("dead", name=called, labels=labels, opts=self._child)
        gcp.pubsub.TopicIAMMember(
            "pubsub-buries",
            topic=dead.name,
            role="roles/pubsub.publisher",
            member=self._pubsub.member,
            opts=self._child,
        )
        gcp.pubsub.Subscription(
            "dead",
            name=called,
            topic=dead.name,
            message_retention_duration=f"{_DEAD_S}s",
            expiration_policy=gcp.pubsub.SubscriptionExpirationPolicyArgs(ttl=""),
            labels=labels,
            opts=self._child,
        )
        return dead
