-- Runs once, when PostgreSQL's volume is new. Airflow's database is POSTGRES_DB.
CREATE DATABASE mlflow;
