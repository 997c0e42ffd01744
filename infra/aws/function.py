"""The function on Lambda, its triggers, and the arguments of the stack's drain.

A round is started by an agent's report (to the function's URL), the schedule, or an event of EC2 (interruption,
rebalance, state change). The function's name is fixed, because policies and its log group use it; AWS chooses its URL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.aws import rights
from infra.aws.identity import AwsIdentity
from infra.aws.network import abroad, at_home
from infra.aws.rights import Arns, Statement, document
from infra.aws.storage import AwsStorage
from infra.drain import Drained
from infra.settings.model import Settings
from infra.shared import Component, key_in

HANDLER = "spotkeeper.reconcile.service.aws_lambda.handler"
TICK = "spotkeeper.tick"  # source of the schedule's event (spotkeeper.reconcile.service.aws_lambda)
LOG_DAYS = 30
STALE_S = 60  # the next tick comes before an older event; also the minimum of EventBridge and Lambda
KEPT_S = 4 * 24 * 3600  # undelivered events remain readable over a long weekend
# Events carry no tags, so events of other machines arrive too: the function looks up each id and ignores such machines.
EVENTS: dict[str, tuple[str, ...]] = {
    "interruption": ("EC2 Spot Instance Interruption Warning",),
    "rebalance": ("EC2 Instance Rebalance Recommendation",),
    "state": ("EC2 Instance State-change Notification",),
}
ENDS = ("shutting-down", "stopping", "stopped", "terminated")  # states that may mean a loss


class AwsFunction(Component):
    """The function. ``url``: where agents report; ``access``: rights to call it; ``dead``: queue of failed events."""

    def __init__(
        self,
        settings: Settings,
        storage: AwsStorage,
        identity: AwsIdentity,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("Function", settings, opts)
        self.logs = aws.cloudwatch.LogGroup(  # a group made by Lambda would outlive a destroy and keep all lines
            self.home_key("logs"),
            name=rights.log_group(settings.stack),
            retention_in_days=LOG_DAYS,
            tags=self.tags(rights.log_group(settings.stack)),
            region=at_home(settings),
            opts=self.child,
        )
        self.dead = aws.sqs.Queue(
            self.home_key("dead"),
            name=rights.dead_letters(settings.stack),
            message_retention_seconds=KEPT_S,
            sqs_managed_sse_enabled=True,
            tags=self.tags(rights.dead_letters(settings.stack)),
            region=at_home(settings),
            opts=self.child,
        )
        self.function = self._declare(storage, identity)
        retries = self._no_retries()
        function_url = aws.lambda_.FunctionUrl(
            self.home_key("url"),
            function_name=self.function.name,
            authorization_type="AWS_IAM",
            region=at_home(settings),
            opts=self.child,
        )
        self.url: pulumi.Output[str] = function_url.function_url.apply(lambda url: url.removesuffix("/"))
        # Machines have both rights from their role's policy, which suffices within an account. A permission that names
        # the role would fail until Lambda knows the new role: "The provided principal was invalid".
        self.access = [
            call
            for i, arn in enumerate(settings.reconcile.invokers)
            for call in self._permissions(f"person-{i}", arn, function_url)
        ]
        self.parts += [self.logs, self.dead, self.function, retries, function_url, *self.access]
        self.register_outputs({"url": self.url})

    def _declare(self, storage: AwsStorage, identity: AwsIdentity) -> aws.lambda_.Function:
        settings = self.settings
        return aws.lambda_.Function(
            self.home_key("function"),
            name=self.prefix,
            description="Spotkeeper reconcile: runs jobs' rounds, started by the schedule, by reports and by events",
            runtime=f"python{python(settings)}",
            architectures=["x86_64"],
            handler=HANDLER,
            # Lambda reads code only from a bucket in its own region.
            s3_bucket=storage.bucket.bucket if at_home(settings) is None else None,
            s3_key=storage.source.key if at_home(settings) is None else None,
            code=pulumi.FileArchive(str(storage.archive.path)) if at_home(settings) is not None else None,
            role=identity.function.arn,
            memory_size=settings.reconcile.memory_mb,
            timeout=settings.reconcile.timeout_s,
            # No concurrency is reserved: a new account has ten executions in all, and all must stay unreserved.
            environment=aws.lambda_.FunctionEnvironmentArgs(variables=environment(settings)),
            logging_config=aws.lambda_.FunctionLoggingConfigArgs(log_format="Text", log_group=self.logs.name),
            tags=self.tags(self.prefix),
            region=at_home(settings),
            # The function runs with these rights and logs to this group: both must exist first.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[*identity.bindings, self.logs]),
        )

    def _no_retries(self) -> aws.lambda_.FunctionEventInvokeConfig:
        """Declare that Lambda does not retry a failed call: the next tick does the work of a failed tick or event."""
        return aws.lambda_.FunctionEventInvokeConfig(
            self.home_key("no-retries"),
            function_name=self.function.name,
            maximum_retry_attempts=0,
            maximum_event_age_in_seconds=STALE_S,
            destination_config=aws.lambda_.FunctionEventInvokeConfigDestinationConfigArgs(
                on_failure=aws.lambda_.FunctionEventInvokeConfigDestinationConfigOnFailureArgs(
                    destination=self.dead.arn
                )
            ),
            region=at_home(self.settings),
            opts=self.child,
        )

    def _permissions(
        self, name: str, arn: pulumi.Input[str], url: aws.lambda_.FunctionUrl
    ) -> list[aws.lambda_.Permission]:
        """Declare the two rights that AWS demands for calls of the URL; neither allows direct calls of the function."""
        opts = pulumi.ResourceOptions(parent=self, depends_on=[url])
        shared: dict[str, Any] = {
            "function": self.function.name,
            "principal": arn,
            "region": at_home(self.settings),
            "opts": opts,
        }
        by_url, call = "lambda:InvokeFunctionUrl", "lambda:InvokeFunction"
        return [
            aws.lambda_.Permission(
                self.home_key(f"url-{name}"), action=by_url, function_url_auth_type="AWS_IAM", **shared
            ),
            aws.lambda_.Permission(self.home_key(f"call-{name}"), action=call, invoked_via_function_url=True, **shared),
        ]


def python(settings: Settings) -> str:
    """Return the function's Python version in the form ``3.11``."""
    return f"3.{settings.reconcile.runtime.removeprefix('python3')}"


def environment(settings: Settings) -> dict[str, str]:
    """Return the function's environment variables, which `spotkeeper.reconcile.service` documents."""
    submitters = (Arns(settings).role(rights.SUBMITTER),) if settings.submitters else ()
    callers = (*settings.reconcile.invokers, *submitters)
    values = {
        "SPOTKEEPER_STACK": settings.stack,
        "SPOTKEEPER_BUCKET": f"s3://{settings.bucket_name()}",
        "SPOTKEEPER_INVOKERS": ",".join(callers),
        "SPOTKEEPER_SUBMITTERS": ",".join(settings.submitters),
        "SPOTKEEPER_CHANNELS": settings.addresses(),
        "SPOTKEEPER_ADDRESSES": ",".join(settings.network.addresses),
        "SPOTKEEPER_COMPUTE_ENDPOINT": own_endpoint(settings, "ec2"),
        "SPOTKEEPER_BUCKET_ENDPOINT": own_endpoint(settings, "s3"),
        "SPOTKEEPER_BUCKET_REGION": settings.region if at_home(settings) is not None else "",
    }
    return {name: value for name, value in values.items() if value}


def profile() -> str:
    """Return the AWS profile that `pulumi up` uses on the operator's machine; "" if the shell chooses it."""
    return pulumi.Config("aws").get("profile") or ""


def own_endpoint(settings: Settings, service: str) -> str:
    """Return a service's address if the stack file sets one that is not AWS's own, else ""."""
    given = settings.endpoints.compute if service == "ec2" else settings.endpoints.storage
    return "" if given == f"https://{service}.{settings.region}.amazonaws.com" else given


def drain_args(settings: Settings, storage: AwsStorage) -> dict[str, Any]:
    return {
        "cloud": "aws",
        "stack": settings.stack,
        "region": settings.region,
        "bucket": storage.bucket.bucket,
        "profile": profile(),
        "ec2": own_endpoint(settings, "ec2"),
        "s3": own_endpoint(settings, "s3"),
        **({"regions": list(settings.regions)} if len(settings.regions) > 1 else {}),
    }


class AwsTriggers(Component):
    """The schedule and the event routes. A destroy deletes them first: a later tick would launch machines again."""

    def __init__(
        self,
        settings: Settings,
        function: AwsFunction,
        identity: AwsIdentity,
        drained: Drained,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("Triggers", settings, opts)
        self._function, self._identity, self._drain = function, identity, drained.drain
        self.tick = self._schedule()
        home = settings.home_region()
        rules = {key: self._rule(key, kinds, home) for key, kinds in EVENTS.items()}
        self._dead_letters(list(rules.values()))
        self.routes = [self._route(key, rule) for key, rule in rules.items()]
        for region in settings.regions:
            if region != home:
                self._forward(region)
        self.register_outputs({})

    def _forward(self, region: str) -> None:
        """Send another region's events to the home region's bus, where the rules of the home region match them.

        The next tick does the work of a lost event, so this region has no queue for undelivered events.
        """
        needed = [self._drain, self._identity.forwards, self.tick]  # a lost region answers nothing: its turn is last
        for key, kinds in EVENTS.items():
            aws.cloudwatch.EventTarget(
                key_in(key, region, self.settings),
                rule=self._rule(key, kinds, region).name,
                arn=Arns(self.settings).bus(),
                role_arn=self._identity.forward.arn,
                region=abroad(region, self.settings),
                opts=pulumi.ResourceOptions(parent=self, depends_on=needed),
            )

    def _schedule(self) -> aws.scheduler.Schedule:
        function = self._function
        minutes = self.settings.reconcile.tick_minutes
        return aws.scheduler.Schedule(
            self.home_key("tick"),
            name=self.prefix,
            description="Spotkeeper's tick",
            schedule_expression=f"rate({minutes} minute{'s' if minutes > 1 else ''})",
            flexible_time_window=aws.scheduler.ScheduleFlexibleTimeWindowArgs(mode="OFF"),
            target=aws.scheduler.ScheduleTargetArgs(
                arn=function.function.arn,
                role_arn=self._identity.clock.arn,
                input=json.dumps({"source": TICK}),
                # The next tick is the retry.
                retry_policy=aws.scheduler.ScheduleTargetRetryPolicyArgs(
                    maximum_retry_attempts=0, maximum_event_age_in_seconds=STALE_S
                ),
                dead_letter_config=aws.scheduler.ScheduleTargetDeadLetterConfigArgs(arn=function.dead.arn),
            ),
            region=at_home(self.settings),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._drain]),
        )

    def _rule(self, key: str, kinds: Sequence[str], region: str) -> aws.cloudwatch.EventRule:
        settings = self.settings
        called = f"{self.prefix}-{key}"
        return aws.cloudwatch.EventRule(
            key_in(key, region, settings),
            name=called,
            description=f"Spotkeeper {settings.stack}: {', '.join(kinds)}",
            event_pattern=json.dumps(pattern(settings.account, key, kinds)),
            tags=self.tags(called),
            region=abroad(region, settings),
            opts=self.child,
        )

    def _dead_letters(self, rules: Sequence[aws.cloudwatch.EventRule]) -> None:
        arns = Arns(self.settings)

        def policy(sources: Sequence[str]) -> str:
            from_rules = {"ArnEquals": {"aws:SourceArn": list(sources)}}
            events = {"Service": "events.amazonaws.com"}
            return document([Statement("PutAside", ("sqs:SendMessage",), (arns.dead_letters(),), from_rules, events)])

        aws.sqs.QueuePolicy(
            self.home_key("dead-letters"),
            queue_url=self._function.dead.url,
            policy=pulumi.Output.all(*(rule.arn for rule in rules)).apply(policy),
            region=at_home(self.settings),
            opts=self.child,
        )

    def _route(self, key: str, rule: aws.cloudwatch.EventRule) -> aws.cloudwatch.EventTarget:
        function = self._function
        permission = aws.lambda_.Permission(
            self.home_key(f"event-{key}"),
            function=function.function.name,
            action="lambda:InvokeFunction",
            principal="events.amazonaws.com",
            source_arn=rule.arn,
            region=at_home(self.settings),
            opts=self.child,
        )
        return aws.cloudwatch.EventTarget(
            self.home_key(key),
            rule=rule.name,
            arn=function.function.arn,
            retry_policy=aws.cloudwatch.EventTargetRetryPolicyArgs(
                maximum_event_age_in_seconds=STALE_S, maximum_retry_attempts=2
            ),
            dead_letter_config=aws.cloudwatch.EventTargetDeadLetterConfigArgs(arn=function.dead.arn),
            region=at_home(self.settings),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self._drain, permission]),
        )


def pattern(account: str, key: str, kinds: Sequence[str]) -> dict[str, object]:
    """Return the EventBridge pattern for EC2's events of ``kinds``.

    With ``key`` "state" it matches a change of state only if the new state is in ``ENDS``.
    """
    found: dict[str, object] = {"source": ["aws.ec2"], "account": [account], "detail-type": list(kinds)}
    return {**found, "detail": {"state": list(ENDS)}} if key == "state" else found
