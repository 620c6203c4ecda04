"""`python -m dap.reports`: merges the reports of several seeds; see `dap.reports.merge`."""

from dap.reports.merge import main

if __name__ == "__main__":
    main()
