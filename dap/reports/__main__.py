"""Run `python -m dap.reports`, which merges or compares reports."""

from dap.reports.command_line import main

if __name__ == "__main__":
    main()
