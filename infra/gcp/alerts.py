"""Optional mails when ticks stop, when a job cannot continue, and at thresholds of a budget."""

from __future__ import annotations

import pulumi
import pulumi_gcp as gcp

from infra.gcp.function import GcpTriggers
from infra.settings.model import Budget, Settings
from infra.shared import ALARM_TEXTS, Component
from spotkeeper.contract.names import LABEL_STACK

_EVERY = "3600s"  # at most one mail per hour and policy; a lasting condition is mailed again
_CLOSED = "86400s"
# alerts.about -> a filter of the function's log (service/logging_json.py).
LOGGED = {
    "holds": 'jsonPayload.event="hold" AND NOT jsonPayload.reason="pause"',
    "spend": 'jsonPayload.event="limit"',
    "orphans": 'jsonPayload.event="orphan"',
}
TICK = "tick"  # event of the log line of a successful tick (spotkeeper.reconcile.controller.alarm)
_DOCUMENTATION = (
    'See severity>=WARNING in the log of the Run service; docs/troubleshooting.md, "Log lines", explains the lines.'
)


class GcpAlerts(Component):
    """The component that sends mail when ticks are missed, on some log lines of the function, and about the budget."""

    def __init__(self, settings: Settings, triggers: GcpTriggers) -> None:
        super().__init__("Alerts", settings)
        self._triggers = triggers
        self._mail = self._channel(settings.alerts.email) if settings.alerts.email else None
        if self._mail is not None:
            about = settings.alerts.about
            if "ticks" in about:
                self._policy("silence", "no tick succeeded", [self._silence()])
                self._policy("errors", "the function logged an error", [self._log("an error", "severity>=ERROR")])
                self._policy("dead-letters", "preemption events do not arrive", [self._undelivered()])
            for key, pattern in LOGGED.items():
                if key in about:
                    self._policy(key, ALARM_TEXTS[key], [self._log(ALARM_TEXTS[key], pattern)])
        if settings.budget:
            self._budget(settings.budget)
        self.register_outputs({})

    def _channel(self, email: str) -> gcp.monitoring.NotificationChannel:
        return gcp.monitoring.NotificationChannel(
            "mail", display_name=f"Spotkeeper {self.settings.stack}", type="email",
            labels={"email_address": email}, opts=self.child,
        )  # fmt: skip

    def _policy(self, key: str, message: str, conditions: list[gcp.monitoring.AlertPolicyConditionArgs]) -> None:
        """Declare an alert policy. For conditions on logs the API demands a rate limit; for others it forbids one."""
        of_log = any(condition.condition_matched_log is not None for condition in conditions)
        rate = gcp.monitoring.AlertPolicyAlertStrategyNotificationRateLimitArgs(period=_EVERY) if of_log else None
        gcp.monitoring.AlertPolicy(
            key,
            display_name=f"Spotkeeper {self.settings.stack}: {message}",
            combiner="OR",
            conditions=conditions,
            alert_strategy=gcp.monitoring.AlertPolicyAlertStrategyArgs(
                auto_close=_CLOSED, notification_rate_limit=rate
            ),
            documentation=gcp.monitoring.AlertPolicyDocumentationArgs(
                content=_DOCUMENTATION, mime_type="text/markdown"
            ),
            notification_channels=[self._mail.name] if self._mail else [],
            opts=self.child,
        )

    def _silence(self) -> gcp.monitoring.AlertPolicyConditionArgs:
        """Return the condition that no tick has succeeded for a while; requests of agents do not count as ticks.

        It is written in PromQL: before the first tick the metric has no data, and for a metric without data the API
        refuses every other kind of condition.
        """
        metric = f"{self.prefix.replace('-', '_')}_ticks"  # in PromQL's spelling
        gcp.logging.Metric(
            "ticks",
            name=metric,
            filter=self._lines(f'jsonPayload.event="{TICK}"'),
            metric_descriptor=gcp.logging.MetricMetricDescriptorArgs(metric_kind="DELTA", value_type="INT64"),
            opts=self.child,
        )
        series = f'logging_googleapis_com:user_{metric}{{monitored_resource="cloud_run_revision"}}'
        window = f"[{max(5, 2 * self.settings.reconcile.tick_minutes)}m]"
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name="no tick succeeded",
            condition_prometheus_query_language=gcp.monitoring.AlertPolicyConditionConditionPrometheusQueryLanguageArgs(
                query=f"sum(increase({series}{window})) < 1 or absent_over_time({series}{window})",
                duration=f"{self.settings.alerts.missed_minutes * 60}s",
                evaluation_interval="60s",
                disable_metric_validation=True,
            ),
        )

    def _log(self, message: str, pattern: str) -> gcp.monitoring.AlertPolicyConditionArgs:
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name=message,
            condition_matched_log=gcp.monitoring.AlertPolicyConditionConditionMatchedLogArgs(
                filter=self._lines(pattern), label_extractors={"job": "EXTRACT(jsonPayload.job)"}
            ),
        )

    def _lines(self, pattern: str) -> str:
        where = ('resource.type="cloud_run_revision"', f'resource.labels.service_name="{self.prefix}"')
        return " AND ".join((*where, pattern))

    def _undelivered(self) -> gcp.monitoring.AlertPolicyConditionArgs:
        """Return the condition that a preemption event could not be delivered: its job then waits for the next tick."""
        return gcp.monitoring.AlertPolicyConditionArgs(
            display_name="an event could not be delivered",
            condition_threshold=gcp.monitoring.AlertPolicyConditionConditionThresholdArgs(
                filter=self._triggers.push.name.apply(
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
        """Declare the budget, which mails the billing account's administrators and the address in ``alerts.email``.

        The Budget API accepts a person's login only if the request names the project that is charged for the request.
        """
        billed = gcp.Provider(
            "budget", project=self.settings.project, billing_project=self.settings.project,
            user_project_override=True, opts=self.child,
        )  # fmt: skip
        gcp.billing.Budget(
            "budget",
            billing_account=budget.billing_account,
            display_name=f"Spotkeeper {self.settings.stack}",
            amount=gcp.billing.BudgetAmountArgs(
                specified_amount=gcp.billing.BudgetAmountSpecifiedAmountArgs(
                    currency_code=budget.currency, units=str(budget.monthly)
                )
            ),
            budget_filter=gcp.billing.BudgetBudgetFilterArgs(labels={LABEL_STACK: self.settings.stack}),
            threshold_rules=[
                gcp.billing.BudgetThresholdRuleArgs(threshold_percent=percent / 100) for percent in budget.alert_at
            ],
            all_updates_rule=gcp.billing.BudgetAllUpdatesRuleArgs(monitoring_notification_channels=[self._mail.name])
            if self._mail
            else None,
            opts=pulumi.ResourceOptions(parent=self, provider=billed),
        )
