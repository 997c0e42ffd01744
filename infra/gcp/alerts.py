"""Who is told when the loop stops, when a job cannot go on, and when the money runs: all opt-in."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp
from spotkeeper.spec.names import LABEL_STACK

from infra import naming
from infra.gcp.reconcile import Function, Triggers
from infra.settings import Budget, Settings

_EVERY = "3600s"  # at most one mail an hour and policy: what lasts is said again
_CLOSED = "86400s"
# Of the function's log, by its ``event`` and ``reason`` (spotkeeper.reconcile.logs) -> what people are told.
LOGGED: dict[str, tuple[str, str]] = {
    "holds": ('jsonPayload.event="hold" AND NOT jsonPayload.reason="pause"', "a job holds: it waits for a person"),
    "spend": ('jsonPayload.event="fuse"', "a money fuse has blown: no further machine is bought"),
    "orphans": ('jsonPayload.event="orphan"', "machines or disks of a job that nobody knows"),
}
_DOCUMENTATION = "Function log: severity>=WARNING of the Run service. What each line means: docs/operate.md, Alarms."


@dataclass(frozen=True)
class AlertsArgs:
    settings: Settings
    function: Function
    triggers: Triggers


class Alerts(pulumi.ComponentResource):
    """Mails: of ticks that are missed, of what the function says in its log, and of a budget's thresholds."""

    def __init__(self, name: str, args: AlertsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Alerts", name, None, opts)
        self._args, self._settings = args, args.settings
        self._service = naming.stack(args.settings.stack)
        self._child = pulumi.ResourceOptions(parent=self)
        self._mail = self._channel(args.settings.alerts.email) if args.settings.alerts.email else None
        if self._mail is not None:
            about = args.settings.alerts.about
            if "ticks" in about:
                self._policy("silence", "no tick answered", [self._silence()])
                self._policy("amiss", "the loop cannot do its work", [self._log("an error", "severity>=ERROR")])
                self._policy("dead-letters", "preemption events do not arrive", [self._undelivered()])
            for key, (pattern, message) in LOGGED.items():
                if key in about:
                    self._policy(key, message, [self._log(message, pattern)])
        if args.settings.budget:
            self._budget(args.settings.budget)
        self.register_outputs({})

    def _channel(self, email: str) -> gcp.monitoring.NotificationChannel:
        return gcp.monitoring.NotificationChannel(
            "mail", display_name=f"Spotkeeper {self._settings.stack}", type="email",
            labels={"email_address": email}, opts=self._child,
        )  # fmt: skip

    def _policy(self, key: str, message: str, conditions: list[gcp.monitoring.AlertPolicyConditionArgs]) -> None:
        """One of a log must say how often it may mail, and one of a metric must not."""
        of_log = any(condition.condition_matched_log is not None for condition in conditions)
        rate = gcp.monitoring.AlertPolicyAlertStrategyNotificationRateLimitArgs(period=_EVERY) if of_log else None
        gcp.monitoring.AlertPolicy(
            key,
            display_name=f"Spotkeeper {self._settings.stack}: {message}",
            combiner="OR",
            conditions=conditions,
            alert_strategy=gcp.monitoring.AlertPolicyAlertStrategyArgs(
                auto_close=_CLOSED, notification_rate_limit=rate
            ),
            documentation=gcp.monitoring.AlertPolicyDocumentationArgs(
                content=_DOCUMENTATION, mime_type="text/markdown"
            ),
            notification_channels=[self._mail.name] if self._mail else [],
            opts=self._child,
        )

    def _silence(self) -> gcp.monitoring.AlertPolicyConditionArgs:
        answered = " AND ".join((
            'resource.type = "cloud_run_revision"',
            f'resource.labels.service_name = "{self._service}"',
            'metric.type = "run.googleapis.com/request_count"',
            'metric.labels.response_code_class = "2xx"',
        ))  # fmt: skip
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name="no successful request",
            condition_absent=gcp.monitoring.AlertPolicyConditionConditionAbsentArgs(
                filter=answered,
                duration=f"{self._settings.alerts.missed_minutes * 60}s",
                aggregations=[
                    gcp.monitoring.AlertPolicyConditionConditionAbsentAggregationArgs(
                        alignment_period="60s", per_series_aligner="ALIGN_RATE"
                    )
                ],
            ),
        )

    def _log(self, message: str, pattern: str) -> gcp.monitoring.AlertPolicyConditionArgs:
        lines = " AND ".join((
            'resource.type="cloud_run_revision"',
            f'resource.labels.service_name="{self._service}"',
            pattern,
        ))  # fmt: skip
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name=message,
            condition_matched_log=gcp.monitoring.AlertPolicyConditionConditionMatchedLogArgs(
                filter=lines, label_extractors={"job": "EXTRACT(jsonPayload.job)"}
            ),
        )

    def _undelivered(self) -> gcp.monitoring.AlertPolicyConditionArgs:
        """The tick finds a lost machine anyway; but each loss then costs up to a minute more."""
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name="an event was given up",
            condition_threshold=gcp.monitoring.AlertPolicyConditionConditionThresholdArgs(
                filter=self._args.triggers.push.name.apply(
                    lambda name: (
                        'resource.type = "pubsub_subscription" AND '
                        f'resource.labels.subscription_id = "{name}" AND '
                        'metric.type = "pubsub.googleapis.com/subscription/dead_letter_message_count"'
                    )
                ),
                comparison="COMPARISON_GT",
                threshold_value=0,
                duration="0s",
                aggregations=[
                    gcp.monitoring.AlertPolicyConditionConditionThresholdAggregationArgs(
                        alignment_period="300s", per_series_aligner="ALIGN_SUM"
                    )
                ],
            ),
        )

    def _budget(self, budget: Budget) -> None:
        """Mails go to the billing account's administrators, and to whom the stack's other alarms go."""
        gcp.billing.Budget(
            "budget",
            billing_account=budget.billing_account,
            display_name=f"Spotkeeper {self._settings.stack}",
            amount=gcp.billing.BudgetAmountArgs(
                specified_amount=gcp.billing.BudgetAmountSpecifiedAmountArgs(
                    currency_code=budget.currency, units=str(budget.monthly)
                )
            ),
            budget_filter=gcp.billing.BudgetBudgetFilterArgs(labels={LABEL_STACK: self._settings.stack}),
            threshold_rules=[
                gcp.billing.BudgetThresholdRuleArgs(threshold_percent=percent / 100) for percent in budget.alert_at
            ],
            all_updates_rule=gcp.billing.BudgetAllUpdatesRuleArgs(monitoring_notification_channels=[self._mail.name])
            if self._mail
            else None,
            opts=self._child,
        )
