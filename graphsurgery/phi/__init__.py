"""Evidence for φ: row statistics, the window of the executing dtype, and the choice of φ."""
