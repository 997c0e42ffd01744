"""Who is told when the loop stops, and when the money runs: both opt-in."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
import pulumi_gcp as gcp
from spotkeeper.spec.names import LABEL_STACK

from infra import naming
from infra.gcp.reconcile import Function
from infra.settings import Budget, Settings


@dataclass(frozen=True)
class AlertsArgs:
    settings: Settings
    function: Function


class Alerts(pulumi.ComponentResource):
    """A mail when no tick was answered for a while, and a budget with its thresholds."""

    def __init__(self, name: str, args: AlertsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spotkeeper:gcp:Alerts", name, None, opts)
        self._settings = args.settings
        self._child = pulumi.ResourceOptions(parent=self)
        if args.settings.alerts.email:
            self._silence(args.settings.alerts.email)
        if args.settings.budget:
            self._budget(args.settings.budget)
        self.register_outputs({})

    def _silence(self, email: str) -> None:
        called = naming.stack(self._settings.stack)
        channel = gcp.monitoring.NotificationChannel(
            "mail", display_name=f"Spotkeeper {self._settings.stack}", type="email",
            labels={"email_address": email}, opts=self._child,
        )  # fmt: skip
        answered = " AND ".join((
            'resource.type = "cloud_run_revision"',
            f'resource.labels.service_name = "{called}"',
            'metric.type = "run.googleapis.com/request_count"',
            'metric.labels.response_code_class = "2xx"',
        ))  # fmt: skip
        gcp.monitoring.AlertPolicy(
            "silence",
            display_name=f"Spotkeeper {self._settings.stack}: no tick answered",
            combiner="OR",
            conditions=[
                gcp.monitoring.AlertPolicyConditionArgs(
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
            ],
            notification_channels=[channel.name],
            opts=self._child,
        )

    def _budget(self, budget: Budget) -> None:
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
            opts=self._child,
        )
