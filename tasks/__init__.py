"""What one Airflow task does: writes a spec, starts an engine job, reads a result; gates; registry."""
