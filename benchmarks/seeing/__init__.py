"""`python -m benchmarks seeing`: what it costs that every rank notes its operations for others to see.

The same ranks have two groups, one whose operations are noted and one whose are not, and take turns with them. So
whatever else the machine does befalls both alike. A reader looks on meanwhile, four times a second, as for a page.
"""
