"""Run `python -m dap.reports`, which merges the reports of several seeds."""

from dap.reports.merge import main

if __name__ == "__main__":
    main()
