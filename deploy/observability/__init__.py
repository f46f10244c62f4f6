"""Grafana dashboards and Prometheus alerts, written as code and generated into the Helm chart."""
