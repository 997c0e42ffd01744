"""The function that keeps the fleet, what calls it, and what the drain that ends it goes by.

Three ways lead to a round: an agent's report (the function's URL), the schedule, and the
cloud's own events (interruption, rebalance, state change). The function's name is fixed,
because policies and its log group are named after it; its URL is AWS's choice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import naming
from infra.aws import identity
from infra.aws.identity import Arns, Identity, Statement, document
from infra.aws.storage import Storage
from infra.drain import AwsDrainArgs, Drained
from infra.settings import Settings

HANDLER = "spotkeeper.reconcile.lambda_.handler"
TICK = "spotkeeper.tick"  # source of the schedule's event (spotkeeper.reconcile.lambda_)
LOG_DAYS = 30
STALE_S = 60  # an event that waited longer is older than the next tick, the least that EventBridge and Lambda take
KEPT_S = 4 * 24 * 3600  # what could not be delivered; somebody may want to read it after a long week-end
# An event says no tag, so those of other machines come too: the function looks the id up, and drops strangers.
EVENTS: dict[str, tuple[str, ...]] = {
    "interruption": ("EC2 Spot Instance Interruption Warning",),
    "rebalance": ("EC2 Instance Rebalance Recommendation",),
    "state": ("EC2 Instance State-change Notification",),
}
ENDS = ("shutting-down", "stopping", "stopped", "terminated")  # states that may mean a loss


@dataclass(frozen=True)
class FunctionArgs:
    settings: Settings
    storage: Storage
    identity: Identity


class Function(pulumi.ComponentResource):
    """``url``: where agents report. ``access``: who may call it. ``dead``: the queue of what it could not take."""

    def __init__(self, name: str, args: FunctionArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Function", name, None, opts)
        self._settings = settings = args.settings
        self._child = pulumi.ResourceOptions(parent=self)
        self.logs = aws.cloudwatch.LogGroup(  # Lambda's own would stay after a destroy, and keep everything
            "logs",
            name=identity.log_group(settings.stack),
            retention_in_days=LOG_DAYS,
            tags=self._tags(identity.log_group(settings.stack)),
            opts=self._child,
        )
        self.dead = aws.sqs.Queue(
            "dead",
            name=identity.dead_letters(settings.stack),
            message_retention_seconds=KEPT_S,
            sqs_managed_sse_enabled=True,
            tags=self._tags(identity.dead_letters(settings.stack)),
            opts=self._child,
        )
        self.function = self._function(args)
        retries = self._no_retries()
        door = aws.lambda_.FunctionUrl(
            "url", function_name=self.function.name, authorization_type="AWS_IAM", opts=self._child
        )
        self.url: pulumi.Output[str] = door.function_url.apply(lambda url: url.rstrip("/"))
        self.access = [
            *self._may_call("node", args.identity.node.arn, door),
            *(
                call
                for i, arn in enumerate(settings.reconcile.invokers)
                for call in self._may_call(f"person-{i}", arn, door)
            ),
        ]
        self.parts: list[pulumi.Resource] = [self.logs, self.dead, self.function, retries, door, *self.access]
        self.register_outputs({"url": self.url})

    def _function(self, args: FunctionArgs) -> aws.lambda_.Function:
        settings = self._settings
        called = naming.stack(settings.stack)
        return aws.lambda_.Function(
            "function",
            name=called,
            description="Spotkeeper reconcile: one round for each job, by schedule, report and event",
            runtime=f"python{python(settings)}",
            architectures=["x86_64"],
            handler=HANDLER,
            s3_bucket=args.storage.bucket.bucket,
            s3_key=args.storage.source.key,
            role=args.identity.function.arn,
            memory_size=settings.reconcile.memory_mb,
            timeout=settings.reconcile.timeout_s,
            # No share of the account's processes is reserved: in a new account there are ten, and none to give away.
            environment=aws.lambda_.FunctionEnvironmentArgs(variables=environment(settings)),
            logging_config=aws.lambda_.FunctionLoggingConfigArgs(log_format="Text", log_group=self.logs.name),
            tags=self._tags(called),
            # Run by its rights, and logging to its group: both must be there first.
            opts=pulumi.ResourceOptions.merge(
                self._child, pulumi.ResourceOptions(depends_on=[*args.identity.bindings, self.logs])
            ),
        )

    def _no_retries(self) -> aws.lambda_.FunctionEventInvokeConfig:
        """The next tick is the retry, for a tick and for an event alike."""
        return aws.lambda_.FunctionEventInvokeConfig(
            "no-retries",
            function_name=self.function.name,
            maximum_retry_attempts=0,
            maximum_event_age_in_seconds=STALE_S,
            destination_config=aws.lambda_.FunctionEventInvokeConfigDestinationConfigArgs(
                on_failure=aws.lambda_.FunctionEventInvokeConfigDestinationConfigOnFailureArgs(
                    destination=self.dead.arn
                )
            ),
            opts=self._child,
        )

    def _may_call(
        self, name: str, arn: pulumi.Input[str], door: aws.lambda_.FunctionUrl
    ) -> list[aws.lambda_.Permission]:
        """A URL asks for two rights, the second of them only on its own behalf."""
        opts = pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=[door]))
        return [
            aws.lambda_.Permission(
                f"url-{name}",
                function=self.function.name,
                action="lambda:InvokeFunctionUrl",
                principal=arn,
                function_url_auth_type="AWS_IAM",
                opts=opts,
            ),
            aws.lambda_.Permission(
                f"call-{name}",
                function=self.function.name,
                action="lambda:InvokeFunction",
                principal=arn,
                invoked_via_function_url=True,
                opts=opts,
            ),
        ]

    def _tags(self, name: str) -> dict[str, str]:
        return naming.tags(self._settings.labels, self._settings.stack, name)


def python(settings: Settings) -> str:
    """The function's Python as wheels name it: ``3.11``."""
    return f"3.{settings.reconcile.runtime.removeprefix('python3')}"


def environment(settings: Settings) -> dict[str, str]:
    """The function's settings (`docs/design.md`); what only another cloud needs is left out."""
    values = {
        "SPOTKEEPER_STACK": settings.stack,
        "SPOTKEEPER_BUCKET": f"s3://{settings.bucket_name()}",
        "SPOTKEEPER_INVOKERS": ",".join(settings.reconcile.invokers),
        "SPOTKEEPER_COMPUTE_ENDPOINT": elsewhere(settings, "ec2"),
        "SPOTKEEPER_BUCKET_ENDPOINT": elsewhere(settings, "s3"),
    }
    return {name: value for name, value in values.items() if value}


def elsewhere(settings: Settings, service: str) -> str:
    """A service's address where it is not AWS's own; "" where it is."""
    given = settings.endpoints.compute if service == "ec2" else settings.endpoints.storage
    return "" if given == f"https://{service}.{settings.region}.amazonaws.com" else given


def drain_args(settings: Settings, storage: Storage) -> AwsDrainArgs:
    """What the stack's drain goes by."""
    return AwsDrainArgs(
        stack=settings.stack,
        region=settings.region,
        bucket=storage.bucket.bucket,
        ec2=elsewhere(settings, "ec2"),
        s3=elsewhere(settings, "s3"),
    )


@dataclass(frozen=True)
class TriggersArgs:
    settings: Settings
    function: Function
    identity: Identity
    drained: Drained


class Triggers(pulumi.ComponentResource):
    """Schedule and event routes. They go before the drain: a live schedule would refill what it empties."""

    def __init__(self, name: str, args: TriggersArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Triggers", name, None, opts)
        self._args = args
        self._called = naming.stack(args.settings.stack)
        self._last = pulumi.ResourceOptions(parent=self, depends_on=[args.drained.drain])
        self.tick = self._schedule()
        rules = {key: self._rule(key, kinds) for key, kinds in EVENTS.items()}
        self._dead_letters(list(rules.values()))
        self.routes = [self._route(key, rule) for key, rule in rules.items()]
        self.register_outputs({})

    def _schedule(self) -> aws.scheduler.Schedule:
        settings, function = self._args.settings, self._args.function
        minutes = settings.reconcile.tick_minutes
        return aws.scheduler.Schedule(
            "tick",
            name=self._called,
            description="Spotkeeper's tick",
            schedule_expression=f"rate({minutes} minute{'s' if minutes > 1 else ''})",
            flexible_time_window=aws.scheduler.ScheduleFlexibleTimeWindowArgs(mode="OFF"),
            target=aws.scheduler.ScheduleTargetArgs(
                arn=function.function.arn,
                role_arn=self._args.identity.clock.arn,
                input=json.dumps({"source": TICK}),
                # The next tick is the retry.
                retry_policy=aws.scheduler.ScheduleTargetRetryPolicyArgs(
                    maximum_retry_attempts=0, maximum_event_age_in_seconds=STALE_S
                ),
                dead_letter_config=aws.scheduler.ScheduleTargetDeadLetterConfigArgs(arn=function.dead.arn),
            ),
            opts=self._last,
        )

    def _rule(self, key: str, kinds: Sequence[str]) -> aws.cloudwatch.EventRule:
        settings = self._args.settings
        called = f"{self._called}-{key}"
        return aws.cloudwatch.EventRule(
            key,
            name=called,
            description=f"Spotkeeper {settings.stack}: {', '.join(kinds)}",
            event_pattern=json.dumps(pattern(settings.account, key, kinds)),
            tags=naming.tags(settings.labels, settings.stack, called),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _dead_letters(self, rules: Sequence[aws.cloudwatch.EventRule]) -> None:
        arns = Arns(self._args.settings)

        def policy(sources: Sequence[str]) -> str:
            told = {"ArnEquals": {"aws:SourceArn": list(sources)}}
            who = {"Service": "events.amazonaws.com"}
            return document([Statement("PutAside", ("sqs:SendMessage",), (arns.dead_letters(),), told, who)])

        aws.sqs.QueuePolicy(
            "dead-letters",
            queue_url=self._args.function.dead.url,
            policy=pulumi.Output.all(*(rule.arn for rule in rules)).apply(policy),
            opts=pulumi.ResourceOptions(parent=self),
        )

    def _route(self, key: str, rule: aws.cloudwatch.EventRule) -> aws.cloudwatch.EventTarget:
        function = self._args.function
        may = aws.lambda_.Permission(
            f"event-{key}",
            function=function.function.name,
            action="lambda:InvokeFunction",
            principal="events.amazonaws.com",
            source_arn=rule.arn,
            opts=pulumi.ResourceOptions(parent=self),
        )
        return aws.cloudwatch.EventTarget(
            key,
            rule=rule.name,
            arn=function.function.arn,
            retry_policy=aws.cloudwatch.EventTargetRetryPolicyArgs(
                maximum_event_age_in_seconds=STALE_S, maximum_retry_attempts=2
            ),
            dead_letter_config=aws.cloudwatch.EventTargetDeadLetterConfigArgs(arn=function.dead.arn),
            opts=pulumi.ResourceOptions.merge(self._last, pulumi.ResourceOptions(depends_on=[may])),
        )


def pattern(account: str, key: str, kinds: Sequence[str]) -> dict[str, object]:
    """What EventBridge is to hand on: of state changes, only those to an end."""
    found: dict[str, object] = {"source": ["aws.ec2"], "account": [account], "detail-type": list(kinds)}
    return {**found, "detail": {"state": list(ENDS)}} if key == "state" else found
