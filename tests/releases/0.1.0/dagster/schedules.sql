BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('29b539ebc72a');
CREATE TABLE asset_daemon_asset_evaluations (
	id INTEGER NOT NULL, 
	evaluation_id INTEGER, 
	asset_key TEXT, 
	asset_evaluation_body TEXT, 
	num_requested INTEGER, 
	num_skipped INTEGER, 
	num_discarded INTEGER, 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	PRIMARY KEY (id)
);
CREATE TABLE instigators (
	id INTEGER NOT NULL, 
	selector_id VARCHAR(255), 
	repository_selector_id VARCHAR(255), 
	status VARCHAR(63), 
	instigator_type VARCHAR(63), 
	instigator_body TEXT, 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	update_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	PRIMARY KEY (id), 
	UNIQUE (selector_id)
);
INSERT INTO "instigators" VALUES(1,'aa49b718c4c98f96bbaef57d6932250cd4b0f96f','498b547cbee12af2bc5563ec9734bf8160df3ec7','DECLARED_IN_CODE','SENSOR','{"__class__": "InstigatorState", "job_specific_data": {"__class__": "SensorInstigatorData", "cursor": "{\"cursors\": {\"outbox\": \"{\\\"checks\\\": {\\\"connector\\\": [null, \\\"\\\", 0.0, []], \\\"partitions_ahead\\\": [2, \\\"0 future days with a partition\\\", 1795897077.2462258, [1795897077.2462258]], \\\"dead_letters\\\": [2, \\\"2 dead letters (2 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"old_transactions\\\": [0, \\\"oldest open transaction: 0.0 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"connector_lag\\\": [null, \\\"\\\", 0.0, []], \\\"delayed\\\": [0, \\\"oldest overdue delayed event: 1.1 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"kafka\\\": [0, \\\"Kafka unreachable from 0 relays\\\", 1795897077.2462258, [1795897077.2462258]], \\\"blocked_aggregates\\\": [1, \\\"1 aggregate blocked by a refused event (1 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"replays\\\": [0, \\\"a replay has stood still for 0.0 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_dropped\\\": [0, \\\"0 days past the retention\\\", 1795897077.2462258, [1795897077.2462258]], \\\"shards_relayed\\\": [0, \\\"a shard without an active relay for 2.6 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"idempotency_keys\\\": [0, \\\"about 1 idempotency keys\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_attached\\\": [0, \\\"0 days detached, with events that are not visible\\\", 1795897077.2462258, [1795897077.2462258]], \\\"slot\\\": [0, \\\"0 problems with the replication slot\\\", 1795897077.2462258, [1795897077.2462258]], \\\"database\\\": [0, \\\"the database is available\\\", 1795897077.2462258, [1795897077.2462258]], \\\"backlog\\\": [0, \\\"3 unpublished events (counting stops at 100,000)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"lag\\\": [0, \\\"oldest unpublished event: 2.1 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_archived\\\": [0, \\\"0 days not archived or not proven in time\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_closed\\\": [2, \\\"1 day not closed in time\\\", 1795897077.2462258, [1795897077.2462258]], \\\"slot_log\\\": [0, \\\"the server keeps 0 bytes of its log for a slot\\\", 1795897077.2462258, [1795897077.2462258]]}, \\\"observed\\\": 1795897077.2462258}\"}, \"errors\": {}}", "last_run_key": null, "last_sensor_start_timestamp": null, "last_tick_start_timestamp": null, "last_tick_success_timestamp": null, "last_tick_timestamp": 1795897077.822787, "min_interval": null, "sensor_type": null}, "job_type": {"__enum__": "InstigatorType.SENSOR"}, "origin": {"__class__": "ExternalJobOrigin", "external_repository_origin": {"__class__": "ExternalRepositoryOrigin", "repository_location_origin": {"__class__": "RegisteredRepositoryLocationOrigin", "location_name": "outbox"}, "repository_name": "__repository__"}, "job_name": "health"}, "status": {"__enum__": "InstigatorStatus.DECLARED_IN_CODE"}}','2026-11-28 20:17:57','2026-11-28 20:17:57');
INSERT INTO "instigators" VALUES(2,'e6d796f1a83e8854d4c78abff126d4de67ac865c','498b547cbee12af2bc5563ec9734bf8160df3ec7','DECLARED_IN_CODE','SENSOR','{"__class__": "InstigatorState", "job_specific_data": {"__class__": "SensorInstigatorData", "cursor": "{\"cursors\": {\"outbox\": \"{\\\"known\\\": {\\\"dead_letters\\\": {\\\"text\\\": \\\"2 dead letters (2 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"partitions_ahead\\\": {\\\"text\\\": \\\"0 future days with a partition\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"days_closed\\\": {\\\"text\\\": \\\"1 day not closed in time\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"failed run of archive_day 2026-11-25\\\": {\\\"text\\\": \\\"no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://\\\\u2026 or az://\\\\u2026\\\", \\\"since\\\": 1795897084.0225747, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}}, \\\"unsent\\\": {}, \\\"runs\\\": {\\\"failed run of archive_day 2026-11-25\\\": {\\\"at\\\": 1795897084.0225747, \\\"run\\\": \\\"0f154d40-268e-49c3-97d7-96558993de11\\\", \\\"why\\\": \\\"no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://\\\\u2026 or az://\\\\u2026\\\", \\\"shard\\\": null}}, \\\"begun\\\": 1795897078.3354807, \\\"after\\\": 1795897083.283531}\"}, \"errors\": {}}", "last_run_key": null, "last_sensor_start_timestamp": null, "last_tick_start_timestamp": null, "last_tick_success_timestamp": null, "last_tick_timestamp": 1795897084.3568878, "min_interval": null, "sensor_type": null}, "job_type": {"__enum__": "InstigatorType.SENSOR"}, "origin": {"__class__": "ExternalJobOrigin", "external_repository_origin": {"__class__": "ExternalRepositoryOrigin", "repository_location_origin": {"__class__": "RegisteredRepositoryLocationOrigin", "location_name": "outbox"}, "repository_name": "__repository__"}, "job_name": "alerts"}, "status": {"__enum__": "InstigatorStatus.DECLARED_IN_CODE"}}','2026-11-28 20:18:01','2026-11-28 20:18:04.426109');
CREATE TABLE job_ticks (
	id INTEGER NOT NULL, 
	job_origin_id VARCHAR(255), 
	selector_id VARCHAR(255), 
	status VARCHAR(63), 
	type VARCHAR(63), 
	timestamp TIMESTAMP, 
	tick_body TEXT, 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	update_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	PRIMARY KEY (id)
);
CREATE TABLE jobs (
	id INTEGER NOT NULL, 
	job_origin_id VARCHAR(255), 
	selector_id VARCHAR(255), 
	repository_origin_id VARCHAR(255), 
	status VARCHAR(63), 
	job_type VARCHAR(63), 
	job_body TEXT, 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	update_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	PRIMARY KEY (id), 
	UNIQUE (job_origin_id)
);
INSERT INTO "jobs" VALUES(1,'534f718742e16efec72ff5d07b02d72ae2236e41',NULL,'293e4a97be42b88f48d06b79da3c8e1ceac856a8','DECLARED_IN_CODE','SENSOR','{"__class__": "InstigatorState", "job_specific_data": {"__class__": "SensorInstigatorData", "cursor": "{\"cursors\": {\"outbox\": \"{\\\"checks\\\": {\\\"connector\\\": [null, \\\"\\\", 0.0, []], \\\"partitions_ahead\\\": [2, \\\"0 future days with a partition\\\", 1795897077.2462258, [1795897077.2462258]], \\\"dead_letters\\\": [2, \\\"2 dead letters (2 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"old_transactions\\\": [0, \\\"oldest open transaction: 0.0 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"connector_lag\\\": [null, \\\"\\\", 0.0, []], \\\"delayed\\\": [0, \\\"oldest overdue delayed event: 1.1 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"kafka\\\": [0, \\\"Kafka unreachable from 0 relays\\\", 1795897077.2462258, [1795897077.2462258]], \\\"blocked_aggregates\\\": [1, \\\"1 aggregate blocked by a refused event (1 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"replays\\\": [0, \\\"a replay has stood still for 0.0 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_dropped\\\": [0, \\\"0 days past the retention\\\", 1795897077.2462258, [1795897077.2462258]], \\\"shards_relayed\\\": [0, \\\"a shard without an active relay for 2.6 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"idempotency_keys\\\": [0, \\\"about 1 idempotency keys\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_attached\\\": [0, \\\"0 days detached, with events that are not visible\\\", 1795897077.2462258, [1795897077.2462258]], \\\"slot\\\": [0, \\\"0 problems with the replication slot\\\", 1795897077.2462258, [1795897077.2462258]], \\\"database\\\": [0, \\\"the database is available\\\", 1795897077.2462258, [1795897077.2462258]], \\\"backlog\\\": [0, \\\"3 unpublished events (counting stops at 100,000)\\\", 1795897077.2462258, [1795897077.2462258]], \\\"lag\\\": [0, \\\"oldest unpublished event: 2.1 s\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_archived\\\": [0, \\\"0 days not archived or not proven in time\\\", 1795897077.2462258, [1795897077.2462258]], \\\"days_closed\\\": [2, \\\"1 day not closed in time\\\", 1795897077.2462258, [1795897077.2462258]], \\\"slot_log\\\": [0, \\\"the server keeps 0 bytes of its log for a slot\\\", 1795897077.2462258, [1795897077.2462258]]}, \\\"observed\\\": 1795897077.2462258}\"}, \"errors\": {}}", "last_run_key": null, "last_sensor_start_timestamp": null, "last_tick_start_timestamp": null, "last_tick_success_timestamp": null, "last_tick_timestamp": 1795897077.822787, "min_interval": null, "sensor_type": null}, "job_type": {"__enum__": "InstigatorType.SENSOR"}, "origin": {"__class__": "ExternalJobOrigin", "external_repository_origin": {"__class__": "ExternalRepositoryOrigin", "repository_location_origin": {"__class__": "RegisteredRepositoryLocationOrigin", "location_name": "outbox"}, "repository_name": "__repository__"}, "job_name": "health"}, "status": {"__enum__": "InstigatorStatus.DECLARED_IN_CODE"}}','2026-11-28 20:17:57','2026-11-28 20:17:57');
INSERT INTO "jobs" VALUES(2,'4c32c01f98a7aee830753425da69b74eff8c5277','e6d796f1a83e8854d4c78abff126d4de67ac865c','293e4a97be42b88f48d06b79da3c8e1ceac856a8','DECLARED_IN_CODE','SENSOR','{"__class__": "InstigatorState", "job_specific_data": {"__class__": "SensorInstigatorData", "cursor": "{\"cursors\": {\"outbox\": \"{\\\"known\\\": {\\\"dead_letters\\\": {\\\"text\\\": \\\"2 dead letters (2 \\\\u00d7 MSG_SIZE_TOO_LARGE: larger than the topic''s max.message.bytes)\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"partitions_ahead\\\": {\\\"text\\\": \\\"0 future days with a partition\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"days_closed\\\": {\\\"text\\\": \\\"1 day not closed in time\\\", \\\"since\\\": 1795897078.3354807, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}, \\\"failed run of archive_day 2026-11-25\\\": {\\\"text\\\": \\\"no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://\\\\u2026 or az://\\\\u2026\\\", \\\"since\\\": 1795897084.0225747, \\\"is_reported\\\": true, \\\"gone_at\\\": null, \\\"times\\\": 1}}, \\\"unsent\\\": {}, \\\"runs\\\": {\\\"failed run of archive_day 2026-11-25\\\": {\\\"at\\\": 1795897084.0225747, \\\"run\\\": \\\"0f154d40-268e-49c3-97d7-96558993de11\\\", \\\"why\\\": \\\"no archive configured: set OUTBOX_ARCHIVE to a directory, s3://bucket/path, gs://\\\\u2026 or az://\\\\u2026\\\", \\\"shard\\\": null}}, \\\"begun\\\": 1795897078.3354807, \\\"after\\\": 1795897083.283531}\"}, \"errors\": {}}", "last_run_key": null, "last_sensor_start_timestamp": null, "last_tick_start_timestamp": null, "last_tick_success_timestamp": null, "last_tick_timestamp": 1795897084.3568878, "min_interval": null, "sensor_type": null}, "job_type": {"__enum__": "InstigatorType.SENSOR"}, "origin": {"__class__": "ExternalJobOrigin", "external_repository_origin": {"__class__": "ExternalRepositoryOrigin", "repository_location_origin": {"__class__": "RegisteredRepositoryLocationOrigin", "location_name": "outbox"}, "repository_name": "__repository__"}, "job_name": "alerts"}, "status": {"__enum__": "InstigatorStatus.DECLARED_IN_CODE"}}','2026-11-28 20:18:01','2026-11-28 20:18:04.406862');
CREATE TABLE secondary_indexes (
	id INTEGER NOT NULL, 
	name VARCHAR(512), 
	create_timestamp DATETIME DEFAULT CURRENT_TIMESTAMP, 
	migration_completed DATETIME, 
	PRIMARY KEY (id), 
	UNIQUE (name)
);
INSERT INTO "secondary_indexes" VALUES(1,'schedule_jobs_selector_id','2026-11-28 20:16:51','2026-11-28 20:16:51.835703');
INSERT INTO "secondary_indexes" VALUES(2,'schedule_ticks_selector_id','2026-11-28 20:16:51','2026-11-28 20:16:51.922854');
CREATE INDEX ix_jobs_job_type ON jobs (job_type);
CREATE INDEX ix_instigators_instigator_type ON instigators (instigator_type);
CREATE INDEX idx_job_tick_status ON job_ticks (job_origin_id, status);
CREATE INDEX idx_tick_selector_timestamp ON job_ticks (selector_id, timestamp);
CREATE INDEX ix_job_ticks_job_origin_id ON job_ticks (job_origin_id);
CREATE INDEX idx_job_tick_timestamp ON job_ticks (job_origin_id, timestamp);
CREATE UNIQUE INDEX idx_asset_daemon_asset_evaluations_asset_key_evaluation_id ON asset_daemon_asset_evaluations (asset_key, evaluation_id);
CREATE INDEX ix_asset_daemon_asset_evaluations_evaluation_id ON asset_daemon_asset_evaluations (evaluation_id);
COMMIT;
