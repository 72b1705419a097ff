"""The simulator's cost model beside a card: problems, predicted cycles, measured cycles."""
