"""Who is told when the loop stops, when a job cannot go on, and when the money runs: all opt-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws
from spotkeeper.spec.names import LABEL_STACK

from infra import naming
from infra.aws.reconcile import Function
from infra.settings import Budget, Settings

NAMESPACE = "Spotkeeper"
# alerts.about -> the event in the function's log (spotkeeper.spec.ledger, reconcile/sweep), and what people are told.
TOLD: dict[str, tuple[str, str]] = {
    "holds": ("hold", "a job holds: it waits for a person"),  # one that somebody paused does not
    "spend": ("fuse", "a money fuse has blown: no machine is bought until somebody looks"),
    "orphans": ("orphan", "machines or disks of a job that nobody knows"),
}


@dataclass(frozen=True)
class AlertsArgs:
    settings: Settings
    function: Function


class Alerts(pulumi.ComponentResource):
    """Mails: when no tick was answered for a while, of what the function's log says, and of a budget's thresholds."""

    def __init__(self, name: str, args: AlertsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:aws:Alerts", name, None, opts)
        self._settings, self._function = args.settings, args.function
        self._called = naming.stack(args.settings.stack)
        self._child = pulumi.ResourceOptions(parent=self)
        if email := args.settings.alerts.email:
            topic = self._mail(email)
            if "ticks" in args.settings.alerts.about:
                self._silence(topic)
            for key, (event, message) in TOLD.items():
                if key in args.settings.alerts.about:
                    self._logged(topic, key, event, message)
        if args.settings.budget:
            self._budget(args.settings.budget)
        self.register_outputs({})

    def _mail(self, email: str) -> aws.sns.Topic:
        topic = aws.sns.Topic("mail", name=f"{self._called}-alerts", tags=self._tags("alerts"), opts=self._child)
        aws.sns.TopicSubscription("mail", topic=topic.arn, protocol="email", endpoint=email, opts=self._child)
        return topic

    def _silence(self, topic: aws.sns.Topic) -> None:
        """Invocations that did not fail; where there are none, there is no figure either."""
        minutes = self._settings.alerts.missed_minutes
        of_function = {"FunctionName": self._function.function.name}
        queries = [
            aws.cloudwatch.MetricAlarmMetricQueryArgs(
                id=metric.lower(),
                metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
                    namespace="AWS/Lambda", metric_name=metric, dimensions=of_function, period=60, stat="Sum"
                ),
            )
            for metric in ("Invocations", "Errors")
        ]
        answered = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="answered", expression="invocations - errors", label="answered", return_data=True
        )
        self._alarm(
            "silence",
            f"no tick was answered for {minutes} minutes",
            topic,
            comparison_operator="LessThanThreshold",
            threshold=1,
            evaluation_periods=minutes,
            treat_missing_data="breaching",
            metric_queries=[*queries, answered],
        )

    def _logged(self, topic: aws.sns.Topic, key: str, event: str, message: str) -> None:
        metric = f"{self._called}-{event}"
        aws.cloudwatch.LogMetricFilter(
            key,
            name=metric,
            log_group_name=self._function.logs.name,
            pattern=pattern(event),
            metric_transformation=aws.cloudwatch.LogMetricFilterMetricTransformationArgs(
                namespace=NAMESPACE, name=metric, value="1"
            ),
            opts=self._child,
        )
        self._alarm(
            key,
            message,
            topic,
            comparison_operator="GreaterThanOrEqualToThreshold",
            threshold=1,
            evaluation_periods=1,
            treat_missing_data="notBreaching",
            namespace=NAMESPACE,
            metric_name=metric,
            statistic="Sum",
            period=300,
        )

    def _alarm(self, key: str, message: str, topic: aws.sns.Topic, **how: Any) -> None:
        aws.cloudwatch.MetricAlarm(
            key,
            name=f"{self._called}-{key}",
            alarm_description=f"Spotkeeper {self._settings.stack}: {message}",
            alarm_actions=[topic.arn],
            ok_actions=[topic.arn],
            tags=self._tags(key),
            opts=self._child,
            **how,
        )

    def _budget(self, budget: Budget) -> None:
        """Counts what bears the stack's tag, once the account has made ``sk-stack`` a cost allocation tag.

        Where nobody is to be told, it is there to be looked at.
        """
        email = self._settings.alerts.email
        aws.budgets.Budget(
            "budget",
            name=self._called,
            budget_type="COST",
            time_unit="MONTHLY",
            limit_amount=str(budget.monthly),
            limit_unit=budget.currency,
            cost_filters=[
                aws.budgets.BudgetCostFilterArgs(
                    name="TagKeyValue", values=[f"user:{LABEL_STACK}${self._settings.stack}"]
                )
            ],
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    notification_type="ACTUAL",
                    threshold=percent,
                    threshold_type="PERCENTAGE",
                    subscriber_email_addresses=[email],
                )
                for percent in (budget.alert_at if email else ())
            ],
            tags=self._tags("budget"),
            opts=self._child,
        )

    def _tags(self, which: str) -> dict[str, str]:
        return naming.tags(self._settings.labels, self._settings.stack, f"{self._called}-{which}")


def pattern(event: str) -> str:
    """CloudWatch's filter for lines of that event."""
    of_event = f'$.event = "{event}"'
    return f'{{ ({of_event}) && ($.reason != "pause") }}' if event == "hold" else f"{{ {of_event} }}"
