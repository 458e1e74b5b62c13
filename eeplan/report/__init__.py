"""The report of a finished training run: tables, figures and one self-contained page. Never imports torch."""
