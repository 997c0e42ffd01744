"""Optional mails when ticks stop, when a job cannot continue, and at thresholds of a budget."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.aws.function import AwsFunction
from infra.aws.network import at_home
from infra.settings.model import Budget, Settings
from infra.shared import ALARM_TEXTS, Component
from spotkeeper.contract.names import LABEL_STACK

NAMESPACE = "Spotkeeper"
TICK = "tick"  # event of the log line of a successful tick (spotkeeper.reconcile.controller.alarm)
# alerts.about -> the event in the function's log (contract/ledger.py, controller/tick.py).
EVENTS = {"holds": "hold", "spend": "limit", "orphans": "orphan"}  # a paused job sends no mail


class AwsAlerts(Component):
    """The component that sends mail when ticks are missed, on some log lines of the function, and about the budget."""

    def __init__(self, settings: Settings, function: AwsFunction, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("Alerts", settings, opts)
        self._function = function
        if email := settings.alerts.email:
            topic = self._mail(email)
            if "ticks" in settings.alerts.about:
                minutes = settings.alerts.missed_minutes
                # The metric counts successful ticks; agents' requests do not count as ticks.
                told = f"no tick succeeded for {minutes} minutes"
                self._alarm(topic, "silence", told, self._counted("ticks", TICK), missing=minutes)
            for key, event in EVENTS.items():
                if key in settings.alerts.about:
                    self._alarm(topic, key, ALARM_TEXTS[key], self._counted(key, event))
        if settings.budget:
            self._budget(settings.budget)
        self.register_outputs({})

    def _mail(self, email: str) -> aws.sns.Topic:
        home = at_home(self.settings)
        topic = aws.sns.Topic(
            self.home_key("mail"), name=f"{self.prefix}-alerts", tags=self._tags("alerts"), region=home, opts=self.child
        )
        aws.sns.TopicSubscription(
            self.home_key("mail"), topic=topic.arn, protocol="email", endpoint=email, region=home, opts=self.child
        )
        return topic

    def _counted(self, key: str, event: str) -> str:
        metric = f"{self.prefix}-{event}"
        aws.cloudwatch.LogMetricFilter(
            self.home_key(key),
            name=metric,
            log_group_name=self._function.logs.name,
            pattern=pattern(event),
            metric_transformation=aws.cloudwatch.LogMetricFilterMetricTransformationArgs(
                namespace=NAMESPACE, name=metric, value="1"
            ),
            region=at_home(self.settings),
            opts=self.child,
        )
        return metric

    def _alarm(self, topic: aws.sns.Topic, key: str, message: str, metric: str, missing: int = 0) -> None:
        """Declare an alarm that is raised when ``metric`` counts a log line.

        With ``missing`` > 0 the alarm is raised instead when the metric has counted no line for ``missing`` minutes.
        """
        aws.cloudwatch.MetricAlarm(
            self.home_key(key),
            name=f"{self.prefix}-{key}",
            alarm_description=f"Spotkeeper {self.settings.stack}: {message}",
            comparison_operator="LessThanThreshold" if missing else "GreaterThanOrEqualToThreshold",
            threshold=1,
            evaluation_periods=missing or 1,
            treat_missing_data="breaching" if missing else "notBreaching",
            namespace=NAMESPACE,
            metric_name=metric,
            statistic="Sum",
            period=60 if missing else 300,
            alarm_actions=[topic.arn],
            ok_actions=[topic.arn],
            tags=self._tags(key),
            region=at_home(self.settings),
            opts=self.child,
        )

    def _budget(self, budget: Budget) -> None:
        """Declare the budget of all resources with this stack's tag; ``sk-stack`` must be a cost allocation tag in AWS.

        Without an e-mail address the budget is only shown in the console.
        """
        email = self.settings.alerts.email
        aws.budgets.Budget(
            "budget",
            name=self.prefix,
            budget_type="COST",
            time_unit="MONTHLY",
            limit_amount=str(budget.monthly),
            limit_unit=budget.currency,
            cost_filters=[
                aws.budgets.BudgetCostFilterArgs(
                    name="TagKeyValue", values=[f"user:{LABEL_STACK}${self.settings.stack}"]
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
            opts=self.child,
        )

    def _tags(self, which: str) -> dict[str, str]:
        return self.tags(f"{self.prefix}-{which}")


def pattern(event: str) -> str:
    of_event = f'$.event = "{event}"'
    return f'{{ ({of_event}) && ($.reason != "pause") }}' if event == "hold" else f"{{ {of_event} }}"
