"""Entry point of servers: `python -m jdisagg.serve --role ROLE`."""
