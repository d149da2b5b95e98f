-- The schema of the store, as the statements that bring it from each version to the next.

-- version 1
CREATE TABLE result (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    stored_at REAL NOT NULL,  -- seconds since 1970
    workload_name TEXT NOT NULL,
    workload_key TEXT,  -- of identity.py, NULL if the workload has none
    setting TEXT,  -- the same, NULL if a sweep may not use the result
    source TEXT NOT NULL,
    device TEXT NOT NULL,
    outcome TEXT NOT NULL,
    config TEXT NOT NULL,  -- JSON, as are versions, asked and result
    versions TEXT NOT NULL,
    asked TEXT NOT NULL,  -- seed, repeats, limit, time limit
    peak_allocated_bytes INTEGER,
    peak_reserved_bytes INTEGER,
    step_seconds REAL,
    result TEXT NOT NULL  -- all of the result, its timeline compressed
);
CREATE INDEX result_by_setting ON result (setting);
CREATE INDEX result_by_workload ON result (workload_name, device);

-- version 2: for sweeps, who is running which setting
CREATE TABLE claim (
    setting TEXT PRIMARY KEY, owner TEXT NOT NULL, claimed_at REAL NOT NULL
) WITHOUT ROWID;

-- version 3: a sweep replaces a row that failed only if a sweep has written it
ALTER TABLE result ADD COLUMN by_sweep INTEGER NOT NULL DEFAULT 0;
