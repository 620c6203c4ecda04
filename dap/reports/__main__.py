"""The reports of several seeds as one: `python -m dap.reports seed1.json seed2.json --output merged.json`."""

from dap.reports.merge import main

if __name__ == "__main__":
    main()
