"""What every benchmark needs: inputs, times, records, tables, the machine, processes of their own."""
