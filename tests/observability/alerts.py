"""All alert rules, in the order of their groups."""

from deploy.observability.alerts import GROUPS

ALERTS = [alert for group in GROUPS.values() for alert in group]
