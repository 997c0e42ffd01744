"""The function on Cloud Run functions, its triggers, and the arguments of the stack's drain.

A round is started by an agent's report, the schedule, or a preemption event of the cloud (log sink -> topic -> push).
The function's name is fixed, because its address is in every template.
"""

from __future__ import annotations

import base64
from typing import Any

import pulumi
import pulumi_gcp as gcp

from infra import naming
from infra.drain import Drained
from infra.gcp.identity import GcpIdentity
from infra.gcp.storage import GcpStorage
from infra.settings.gcp import COMPUTE, is_local
from infra.settings.model import Settings
from infra.shared import Component

# Few processes serve all reports of a gang, so that one round covers many: with a process per report, a thousand
# reports took 18 s and four rounds instead of two (tests/scale).
INSTANCES, AT_ONCE = 4, 80
_IMAGES_DAYS = 7
_TRIES = 5  # after five failed posts an event is older than the next tick
_DEAD_S = 7 * 24 * 3600  # seconds for which an undelivered event is kept
PREEMPTED = 'protoPayload.methodName="compute.instances.preempted"'


class GcpFunction(Component):
    """The function. ``url``: where agents report; ``access``: the rights to call it."""

    def __init__(self, settings: Settings, storage: GcpStorage, identity: GcpIdentity) -> None:
        super().__init__("Function", settings)
        images = self._images()
        self.function = gcp.cloudfunctionsv2.Function(
            self.home_key("function"),
            name=self.prefix,
            location=settings.home_region(),
            description="Spotkeeper reconcile: runs jobs' rounds, started by the schedule, by reports and by events",
            build_config=gcp.cloudfunctionsv2.FunctionBuildConfigArgs(
                runtime=settings.reconcile.runtime,
                entry_point="main",
                docker_repository=images.id,
                service_account=identity.build.id,  # the default build identity has too few roles
                source=gcp.cloudfunctionsv2.FunctionBuildConfigSourceArgs(
                    storage_source=gcp.cloudfunctionsv2.FunctionBuildConfigSourceStorageSourceArgs(
                        bucket=storage.bucket.name, object=storage.source.name
                    )
                ),
            ),
            service_config=gcp.cloudfunctionsv2.FunctionServiceConfigArgs(
                available_memory=f"{settings.reconcile.memory_mb}M",
                timeout_seconds=settings.reconcile.timeout_s,
                available_cpu="1",  # with less CPU, a process serves one request at a time
                max_instance_count=INSTANCES,
                max_instance_request_concurrency=AT_ONCE,
                ingress_settings="ALLOW_ALL",  # IAM checks callers; operators notify the function from outside
                service_account_email=identity.function.email,
                environment_variables=identity.clock.email.apply(lambda email: environment(settings, email)),
            ),
            labels=self.labels(),
            # The build's account and its rights must be in force first.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[identity.settled, *storage.access]),
        )
        self.url = self.function.url
        self.access = [
            self._invoker("node", identity.machine.member),
            self._invoker("clock", identity.clock.member),
            *(self._invoker(naming.address(who), who) for who in settings.callers().values()),
        ]
        self.parts += [self.function, *self.access]
        self.register_outputs({"url": self.url})

    def _images(self) -> gcp.artifactregistry.Repository:
        """Declare the function's image repository; in the default one images would outlive a destroy and cost money."""
        return gcp.artifactregistry.Repository(
            self.home_key("images"),
            repository_id=self.prefix,
            location=self.settings.home_region(),
            format="DOCKER",
            description=f"Spotkeeper {self.settings.stack}: builds of the function",
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
            labels=self.labels(),
            opts=self.child,
        )

    def _invoker(self, name: str, member: pulumi.Input[str]) -> gcp.cloudrunv2.ServiceIamMember:
        """Let ``member`` call the function, by a role on its Run service: roles of Cloud Functions do not suffice."""
        return gcp.cloudrunv2.ServiceIamMember(
            self.home_key(f"call-{name}"),
            name=self.function.name,
            location=self.function.location,
            role="roles/run.invoker",
            member=member,
            opts=self.child,
        )


def function_url(settings: Settings) -> str:
    """Return the function's address, which follows from its name: templates need it before the function exists."""
    known = f"https://{settings.home_region()}-{settings.project}.cloudfunctions.net/{naming.stack(settings.stack)}"
    return settings.endpoints.function or known


def environment(settings: Settings, clock_email: str) -> dict[str, str]:
    """Return the function's environment variables, which `spotkeeper.reconcile.service` documents."""
    people = [naming.address(member) for member in settings.callers().values()]
    if is_local(settings):  # whose users have no accounts: a token names the user that its command runs as
        people += dict.fromkeys(who for team in settings.teams.values() for who in (*team.members, *(team.high or ())))
    values = {
        "SPOTKEEPER_STACK": settings.stack,
        "SPOTKEEPER_BUCKET": f"gs://{settings.bucket_name()}",
        "SPOTKEEPER_REGION": settings.home_region(),
        "SPOTKEEPER_AUDIENCE": function_url(settings),
        "SPOTKEEPER_INVOKERS": ",".join([clock_email, *people]),
        # Read by functions-framework: with its default of four threads, four rounds would block all reports.
        "THREADS": str(AT_ONCE),
    }
    optional = {
        "SPOTKEEPER_COMPUTE_ENDPOINT": settings.endpoints.compute if settings.endpoints.compute != COMPUTE else "",
        "SPOTKEEPER_JWKS": settings.endpoints.jwks,
        "SPOTKEEPER_ISSUER": settings.endpoints.issuer,
        "SPOTKEEPER_ADDRESSES": ",".join(settings.network.addresses),
        "SPOTKEEPER_CHANNELS": settings.addresses(),
    }
    return values | {name: value for name, value in optional.items() if value}


def drain_args(settings: Settings, storage: GcpStorage) -> dict[str, Any]:
    return {
        "cloud": "gcp",
        "stack": settings.stack,
        "project": settings.project,
        "region": settings.region,
        "zones": list(settings.zones),
        "bucket": storage.bucket.name,
        "compute": settings.endpoints.compute,
        "storage": settings.endpoints.storage,
    }


class GcpTriggers(Component):
    """The schedule and the route of preemption events. A destroy deletes them first: later ticks would launch again."""

    def __init__(self, settings: Settings, function: GcpFunction, identity: GcpIdentity, drained: Drained) -> None:
        super().__init__("Triggers", settings)
        self._function, self._identity, self._drain = function, identity, drained.drain
        self.tick = self._schedule()
        self.push = self._preemption_route()
        self.register_outputs({})

    def _schedule(self) -> gcp.cloudscheduler.Job:
        settings = self.settings
        minutes = settings.reconcile.tick_minutes
        return gcp.cloudscheduler.Job(
            self.home_key("tick"),
            name=self.prefix,
            region=settings.home_region(),
            schedule="* * * * *" if minutes == 1 else "0 * * * *" if minutes == 60 else f"*/{minutes} * * * *",
            time_zone="Etc/UTC",
            attempt_deadline=f"{min(settings.reconcile.timeout_s, 1800)}s",
            retry_config=gcp.cloudscheduler.JobRetryConfigArgs(retry_count=0),  # the next tick is the retry
            http_target=gcp.cloudscheduler.JobHttpTargetArgs(
                uri=pulumi.Output.concat(self._function.url, "/v1/tick"),
                http_method="POST",
                headers={"Content-Type": "application/json"},
                body=base64.b64encode(b"{}").decode(),
                oidc_token=gcp.cloudscheduler.JobHttpTargetOidcTokenArgs(
                    service_account_email=self._identity.clock.email, audience=self._function.url
                ),
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._drain]),
        )

    def _preemption_route(self) -> gcp.pubsub.Subscription:
        """Declare the push of preemption events from the audit log, since a machine can vanish before it reports."""
        settings = self.settings
        topic, published = self._topic()
        self._pubsub = gcp.projects.ServiceIdentity(
            "pubsub", project=settings.project, service="pubsub.googleapis.com", opts=self.child
        )
        signs = gcp.serviceaccount.IAMMember(  # pushes carry a token of the clock's account
            "pubsub-is-clock",
            service_account_id=self._identity.clock.name,
            role="roles/iam.serviceAccountTokenCreator",
            member=self._pubsub.member,
            opts=self.child,
        )
        dead = self._dead_letters()
        push = gcp.pubsub.Subscription(
            "push",
            name=f"{self.prefix}-preempted",
            topic=topic.name,
            ack_deadline_seconds=60,
            message_retention_duration="600s",  # a tick finds older losses
            expiration_policy=gcp.pubsub.SubscriptionExpirationPolicyArgs(ttl=""),
            retry_policy=gcp.pubsub.SubscriptionRetryPolicyArgs(minimum_backoff="5s", maximum_backoff="60s"),
            dead_letter_policy=gcp.pubsub.SubscriptionDeadLetterPolicyArgs(
                dead_letter_topic=dead.id, max_delivery_attempts=_TRIES
            ),
            push_config=gcp.pubsub.SubscriptionPushConfigArgs(
                push_endpoint=pulumi.Output.concat(self._function.url, "/v1/event"),
                oidc_token=gcp.pubsub.SubscriptionPushConfigOidcTokenArgs(
                    service_account_email=self._identity.clock.email, audience=self._function.url
                ),
            ),
            labels=self.labels(),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._drain, published, signs]),
        )
        gcp.pubsub.SubscriptionIAMMember(  # Pub/Sub removes given-up messages from this subscription
            "pubsub-gives-up",
            subscription=push.name,
            role="roles/pubsub.subscriber",
            member=self._pubsub.member,
            opts=self.child,
        )
        return push

    def _topic(self) -> tuple[gcp.pubsub.Topic, pulumi.Resource]:
        """Return (the topic for preemptions of this stack's machines, the log sink's right to publish to it)."""
        called = f"{self.prefix}-preempted"
        topic = gcp.pubsub.Topic(
            "preempted", name=called, labels=self.labels(), message_retention_duration="3600s", opts=self.child
        )
        machines = f"/instances/{naming.machine_prefix(self.settings.stack)}"
        sink = gcp.logging.ProjectSink(
            "preempted",
            name=called,
            destination=pulumi.Output.concat("pubsub.googleapis.com/", topic.id),
            filter=f'{PREEMPTED} AND protoPayload.resourceName=~"{machines}"',
            unique_writer_identity=True,
            opts=self.child,
        )
        publisher = gcp.pubsub.TopicIAMMember(
            "sink-publishes",
            topic=topic.name,
            role="roles/pubsub.publisher",
            member=sink.writer_identity,
            opts=self.child,
        )
        return topic, publisher

    def _dead_letters(self) -> gcp.pubsub.Topic:
        """Declare the topic of undelivered events, with a subscription that keeps the events for an operator."""
        called = f"{self.prefix}-dead"
        dead = gcp.pubsub.Topic("dead", name=called, labels=self.labels(), opts=self.child)
        gcp.pubsub.TopicIAMMember(
            "pubsub-buries",
            topic=dead.name,
            role="roles/pubsub.publisher",
            member=self._pubsub.member,
            opts=self.child,
        )
        gcp.pubsub.Subscription(
            "dead",
            name=called,
            topic=dead.name,
            message_retention_duration=f"{_DEAD_S}s",
            expiration_policy=gcp.pubsub.SubscriptionExpirationPolicyArgs(ttl=""),
            labels=self.labels(),
            opts=self.child,
        )
        return dead
