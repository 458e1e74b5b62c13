"""The report's figures, one module per question. Each function turns data into one matplotlib ``Figure``."""
