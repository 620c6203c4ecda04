"""Run `python -m dap_transformers.reports`, which merges or compares reports."""

from dap_transformers.reports.command_line import main

if __name__ == "__main__":
    main()
